// RocketMQ's Go client, for tests/interop/test_other_clients.py: send messages in each way, receive them
// with a push consumer, and print what was seen as one object of JSON.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

// AccessKey and SecretKey of an identity, if the nodes ask for it.
var credentials = primitive.Credentials{
	AccessKey: os.Getenv("ACCESS_KEY"), SecretKey: os.Getenv("SECRET_KEY"),
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type message = primitive.MessageExt
type result = consumer.ConsumeResult

type seen struct {
	Status   []string       `json:"status"`
	Received map[string]int `json:"received"`
	Tagged   map[string]int `json:"tagged"`
	Rich     []string       `json:"rich"`
}

func main() {
	rlog.SetLogLevel("error")
	servers, topic := strings.Split(os.Args[1], ";"), os.Args[2]
	count, err := strconv.Atoi(os.Args[3])
	fail(err)
	if len(os.Args) > 4 {
		back(servers, topic)
		return
	}
	out := seen{Received: map[string]int{}, Tagged: map[string]int{}}
	out.Status = send(servers, topic, count)
	var lock sync.Mutex
	receive(servers, topic, "go-all", "*", func(message *message) result {
		lock.Lock()
		defer lock.Unlock()
		out.Received[string(message.Body)]++
		if string(message.Body) == "go 1" {
			out.Rich = []string{message.GetTags(), message.GetKeys(), message.GetProperty("own")}
		}
		return consumer.ConsumeSuccess
	}, func() int { lock.Lock(); defer lock.Unlock(); return len(out.Received) }, count)
	receive(servers, topic, "go-tagged", "odd", func(message *message) result {
		lock.Lock()
		defer lock.Unlock()
		out.Tagged[string(message.Body)]++
		return consumer.ConsumeSuccess
	}, func() int { lock.Lock(); defer lock.Unlock(); return len(out.Tagged) }, count/2)
	text, err := json.Marshal(out)
	fail(err)
	fmt.Println(string(text))
}

func send(servers []string, topic string, count int) []string {
	options := []producer.Option{producer.WithNameServer(servers),
		producer.WithGroupName("go-producers"), producer.WithRetry(2)}
	if credentials.AccessKey != "" {
		options = append(options, producer.WithCredentials(credentials))
	}
	sender, err := rocketmq.NewProducer(options...)
	fail(err)
	fail(sender.Start())
	defer sender.Shutdown()
	status := []string{}
	for number := 0; number < count; number++ {
		message := primitive.NewMessage(topic, []byte("go "+strconv.Itoa(number)))
		message.WithTag([]string{"even", "odd"}[number%2]).WithKeys([]string{"k" + strconv.Itoa(number)})
		message.WithProperty("own", "value")
		if number == count-1 { // the last one without waiting
			done := make(chan error, 1)
			var result *primitive.SendResult
			for end := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
				err := sender.SendAsync(context.Background(),
					func(_ context.Context, sent *primitive.SendResult, err error) {
						result = sent
						done <- err
					}, message)
				if err == nil { // otherwise it could not connect, and calls nothing
					err = <-done
				}
				if err == nil || time.Now().After(end) {
					fail(err)
					break
				}
			}
			status = append(status, strconv.Itoa(int(result.Status)))
			continue
		}
		result, err := sender.SendSync(context.Background(), message)
		for end := time.Now().Add(60 * time.Second); err != nil && time.Now().Before(end); {
			time.Sleep(20 * time.Millisecond) // as an application does while the master moves
			result, err = sender.SendSync(context.Background(), message)
		}
		fail(err)
		status = append(status, strconv.Itoa(int(result.Status)))
		if number == count/2 {
			fmt.Println("half") // the test may kill the master now
		}
	}
	return status
}

// Send one message, and send it back when the test says so; print how often it came.
func back(servers []string, topic string) {
	send(servers, topic, 1)
	var came atomic.Int32
	receive(servers, topic, "go-back", "*", func(message *message) result {
		if came.Add(1) > 1 {
			return consumer.ConsumeSuccess
		}
		fmt.Println("came")
		bufio.NewReader(os.Stdin).ReadString('\n')
		return consumer.ConsumeRetryLater
	}, func() int { return int(came.Load()) }, 2)
	fmt.Println(came.Load())
}

func receive(servers []string, topic, group, tag string, take func(*message) result,
	received func() int, count int) {
	options := []consumer.Option{consumer.WithNameServer(servers),
		consumer.WithGroupName(group), consumer.WithInstance(group),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset)}
	if credentials.AccessKey != "" {
		options = append(options, consumer.WithCredentials(credentials))
	}
	reader, err := rocketmq.NewPushConsumer(options...)
	fail(err)
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: tag}
	fail(reader.Subscribe(topic, selector,
		func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			result := consumer.ConsumeSuccess
			for _, message := range messages { // one at a time, by default
				result = take(message)
			}
			return result, nil
		}))
	fail(reader.Start())
	for end := time.Now().Add(90 * time.Second); received() < count && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
	}
	fail(reader.Shutdown())
}
