package bench;

import com.alibaba.fastjson2.JSONObject;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** RocketMQ's official pull consumer. */
final class Reading {
    private int instances;

    void addTo(Bench bench) {
        bench.add("consume.pull", this::pull);
        bench.add("consume.lite", this::lite);
        bench.add("consume.push", this::push);
    }

    private static List<MessageQueue> queues(JSONObject request) {
        List<MessageQueue> queues = new ArrayList<>();
        for (int i = 0; i < request.getIntValue("queues"); i++) {
            queues.add(new MessageQueue(request.getString("topic"), "rocketmq", i));
        }
        return queues;
    }

    private static JSONObject result(long began, long bytes) {
        JSONObject result = new JSONObject();
        result.put("seconds", (System.nanoTime() - began) / 1e9);
        result.put("bytes", bytes);
        return result;
    }

    /** Read all queues, with a thread each, until `count` messages have arrived. */
    @SuppressWarnings("deprecation") // DefaultLitePullConsumer is not faster: 0.35 to 0.4 M/s
    private Object pull(JSONObject request) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("pulling" + instances);
        consumer.setInstanceName("pulling" + instances++);
        consumer.setNamesrvAddr(request.getString("namesrv"));
        consumer.setVipChannelEnabled(false);
        consumer.start();
        try {
            List<MessageQueue> queues = queues(request);
            int batch = request.getIntValue("batch");
            long count = request.getLongValue("count");
            AtomicLong bytes = new AtomicLong();
            AtomicLong seen = new AtomicLong();
            long began = System.nanoTime();
            Load.race(queues.size(), queues.size(), number -> {
                long offset = 0;
                while (seen.get() < count) {
                    PullResult got = consumer.pull(queues.get(number), "*", offset, batch);
                    if (got.getPullStatus() != PullStatus.FOUND) {
                        return; // the end of this queue
                    }
                    long size = 0;
                    for (MessageExt message : got.getMsgFoundList()) {
                        size += message.getBody().length;
                    }
                    bytes.addAndGet(size);
                    seen.addAndGet(got.getMsgFoundList().size());
                    offset = got.getNextBeginOffset();
                }
            });
            return result(began, bytes.get());
        } finally {
            consumer.shutdown();
        }
    }

    /**
     * Read all queues from their starts with the lite pull consumer, `batch` messages an answer.
     *
     * A new group begins there. seekToBegin() would interrupt pulls that are under way: the client
     * then closes its connection, and each queue whose pull was on it waits for a second.
     */
    private Object lite(JSONObject request) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("lite" + instances);
        consumer.setInstanceName("lite" + instances++);
        consumer.setNamesrvAddr(request.getString("namesrv"));
        consumer.setVipChannelEnabled(false);
        consumer.setMqClientApiTimeout(30_000);
        consumer.setPullBatchSize(request.getIntValue("batch"));
        consumer.setAutoCommit(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.start();
        try {
            List<MessageQueue> queues =
                new ArrayList<>(consumer.fetchMessageQueues(request.getString("topic")));
            long count = request.getLongValue("count");
            long began = System.nanoTime();
            consumer.assign(queues);
            long bytes = 0;
            for (long seen = 0; seen < count;) {
                List<MessageExt> got = consumer.poll(30_000);
                if (got.isEmpty()) {
                    throw new IllegalStateException(seen + " of " + count + " messages came");
                }
                for (MessageExt message : got) {
                    bytes += message.getBody().length;
                }
                seen += got.size();
            }
            return result(began, bytes);
        } finally {
            consumer.shutdown();
        }
    }

    /** Send one message after the other to a push consumer; return ms from each send to receipt. */
    private Object push(JSONObject request) throws Exception {
        String topic = request.getString("topic");
        DefaultMQProducer producer = new DefaultMQProducer("pushing" + instances);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("pushed" + instances);
        for (org.apache.rocketmq.client.ClientConfig client : List.of(producer, consumer)) {
            client.setInstanceName("push" + instances++);
            client.setNamesrvAddr(request.getString("namesrv"));
            client.setVipChannelEnabled(false);
        }
        long began = System.nanoTime();
        ConcurrentLinkedQueue<Double> took = new ConcurrentLinkedQueue<>();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = System.nanoTime();
            for (MessageExt message : messages) {
                long sent = ByteBuffer.wrap(message.getBody()).getLong();
                if (sent >= began) { // a new group also gets the messages of earlier rounds
                    took.add((now - sent) / 1e6);
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.subscribe(topic, "*");
        producer.start();
        consumer.start();
        try {
            byte[] body = new byte[request.getIntValue("size")];
            int count = request.getIntValue("count");
            while (took.isEmpty()) { // until the consumer has its share of the queues
                ByteBuffer.wrap(body).putLong(System.nanoTime());
                producer.send(new Message(topic, body.clone()));
                LockSupport.parkNanos(500_000_000);
                if (System.nanoTime() - began > 60_000_000_000L) {
                    throw new IllegalStateException("no message was received");
                }
            }
            Thread.sleep(1_000); // what was sent meanwhile has come
            took.clear();
            for (int i = 0; i < count; i++) {
                ByteBuffer.wrap(body).putLong(System.nanoTime());
                producer.send(new Message(topic, body.clone()));
                for (long wait = 0; took.size() <= i; wait++) { // the next one when it has come
                    if (wait > 600_000) {
                        throw new IllegalStateException(took.size() + " messages were received");
                    }
                    LockSupport.parkNanos(50_000);
                }
            }
            return new ArrayList<>(took);
        } finally {
            consumer.shutdown();
            producer.shutdown();
        }
    }
}
