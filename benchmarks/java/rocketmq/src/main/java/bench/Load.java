package bench;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.exception.RemotingException;

/** RocketMQ's official producer under load; it lives, and stays warm, through all repeats. */
final class Load {
    private static final ExecutorService THREADS = Executors.newCachedThreadPool(task -> {
        Thread thread = new Thread(task, "load");
        thread.setDaemon(true);
        return thread;
    });

    /** One numbered put. */
    interface Put {
        void run(int number) throws Exception;
    }

    private DefaultMQProducer producer;
    private byte[] body;
    private String topic;

    void addTo(Bench bench) {
        bench.add("load.start", this::start);
        bench.add("load.blocking", this::blocking);
        bench.add("load.threads", this::threads);
        bench.add("load.batched", this::batched);
        bench.add("load.asynchronous", this::asynchronous);
        bench.add("load.until_acknowledged", this::untilAcknowledged);
    }

    /** Run `count` puts with several threads; return the seconds, or throw the first failure. */
    static double race(int threads, int count, Put put) throws Exception {
        AtomicInteger next = new AtomicInteger();
        List<Future<?>> running = new ArrayList<>();
        long began = System.nanoTime();
        for (int i = 0; i < threads; i++) {
            running.add(THREADS.submit(() -> {
                for (int number = next.getAndIncrement(); number < count;
                        number = next.getAndIncrement()) {
                    put.run(number);
                }
                return null;
            }));
        }
        for (Future<?> one : running) {
            one.get();
        }
        return (System.nanoTime() - began) / 1e9;
    }

    private Object start(JSONObject request) throws Exception {
        topic = request.getString("topic");
        body = new byte[request.getIntValue("size")];
        new Random(1).nextBytes(body);
        producer = new DefaultMQProducer("bench");
        producer.setNamesrvAddr(request.getString("namesrv"));
        producer.setVipChannelEnabled(false);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setRetryTimesWhenSendAsyncFailed(0);
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.setSendMsgTimeout(10_000);
        producer.setPollNameServerInterval(1_000);
        producer.start();
        return true;
    }

    private static void check(SendResult sent) {
        if (sent.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException("a send ended as " + sent.getSendStatus());
        }
    }

    /** Put one message after the other; return the duration of each, in ms. */
    private Object blocking(JSONObject request) throws Exception {
        JSONArray took = new JSONArray();
        for (int i = request.getIntValue("count"); i > 0; i--) {
            long began = System.nanoTime();
            check(producer.send(new Message(topic, body)));
            took.add((System.nanoTime() - began) / 1e6);
        }
        return took;
    }

    private Object threads(JSONObject request) throws Exception {
        return race(request.getIntValue("threads"), request.getIntValue("count"),
            number -> check(producer.send(new Message(topic, body))));
    }

    private Object batched(JSONObject request) throws Exception {
        int batch = request.getIntValue("batch");
        int batches = request.getIntValue("count") / batch;
        return race(request.getIntValue("threads"), batches, number -> {
            List<Message> messages = new ArrayList<>(batch);
            for (int i = 0; i < batch; i++) {
                messages.add(new Message(topic, body));
            }
            check(producer.send(messages));
        });
    }

    private Object asynchronous(JSONObject request) throws Exception {
        int limit = request.getIntValue("in_flight");
        Semaphore room = new Semaphore(limit);
        AtomicReference<Throwable> failed = new AtomicReference<>();
        SendCallback done = new SendCallback() {
            @Override
            public void onSuccess(SendResult sent) {
                if (sent.getSendStatus() != SendStatus.SEND_OK) {
                    failed.set(new IllegalStateException("a send ended as " + sent.getSendStatus()));
                }
                room.release();
            }

            @Override
            public void onException(Throwable failure) {
                failed.set(failure);
                room.release();
            }
        };
        long began = System.nanoTime();
        for (int i = request.getIntValue("count"); i > 0; i--) {
            room.acquire();
            producer.send(new Message(topic, body), done);
        }
        room.acquire(limit);
        double seconds = (System.nanoTime() - began) / 1e9;
        if (failed.get() != null) {
            throw new IllegalStateException(failed.get());
        }
        return seconds;
    }

    /** Send until one put is fully acknowledged; return the number of attempts. */
    private Object untilAcknowledged(JSONObject request) throws Exception {
        long deadline = System.nanoTime() + request.getLongValue("limit_s") * 1_000_000_000L;
        for (int attempt = 1; System.nanoTime() < deadline; attempt++) {
            try {
                SendResult sent = producer.send(new Message(topic, body), 3_000);
                if (sent.getSendStatus() == SendStatus.SEND_OK) {
                    return attempt;
                }
            } catch (MQClientException | MQBrokerException | RemotingException refused) {
                Thread.sleep(5); // the master is down, or refuses it for now
            }
        }
        throw new IllegalStateException("nothing was acknowledged in time");
    }
}
