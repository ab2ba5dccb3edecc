package interop.five;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import interop.Lines;
import interop.Peer;
import java.io.Writer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** RocketMQ's official producer and consumer. */
final class ClientOperations {
    private final Map<List<Object>, DefaultMQProducer> producers = new HashMap<>();
    private int instances;

    void addTo(Peer peer) {
        peer.add("produce", this::produce);
        peer.add("consume", this::consume);
        peer.add("pull", this::pull);
    }

    private synchronized String instance() {
        return "peer-" + ProcessHandle.current().pid() + "-" + instances++;
    }

    /** Send `count` messages of a kind; return [status, queue, queue offset, sha1] for each. */
    private Object produce(JSONObject request) throws Exception {
        return new Sending(producer(request), request, request.getString("kind")).run();
    }

    /** Return the producer with these settings; it stays, because a shutdown may take 3 s. */
    private synchronized DefaultMQProducer producer(JSONObject request) throws Exception {
        boolean transactions = request.getString("kind").equals("transactional");
        List<Object> settings = Arrays.asList(transactions, request.get("namesrv"),
            request.get("timeout"), request.get("retries"), request.get("compression"));
        if (producers.containsKey(settings)) {
            return producers.get(settings);
        }
        DefaultMQProducer producer =
            transactions ? transactional() : new DefaultMQProducer("producers");
        producers.put(settings, producer);
        producer.setInstanceName(instance());
        producer.setNamesrvAddr(request.getString("namesrv"));
        producer.setSendMsgTimeout(request.getIntValue("timeout", 3000));
        producer.setRetryTimesWhenSendFailed(request.getIntValue("retries", 0));
        if (request.containsKey("compression")) {
            producer.setCompressType(CompressionType.of(request.getString("compression")));
        }
        producer.start();
        return producer;
    }

    private static TransactionMQProducer transactional() {
        TransactionMQProducer producer = new TransactionMQProducer("transactions");
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object number) {
                return switch ((Integer) number % 3) {
                    case 0 -> LocalTransactionState.COMMIT_MESSAGE;
                    case 1 -> LocalTransactionState.ROLLBACK_MESSAGE;
                    default -> LocalTransactionState.UNKNOW;
                };
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.UNKNOW;
            }
        });
        return producer;
    }

    private static final class Sending {
        private final DefaultMQProducer producer;
        private final JSONObject request;
        private final String kind;
        private final String topic;
        private final Random random;
        private final JSONArray results = new JSONArray();

        Sending(DefaultMQProducer producer, JSONObject request, String kind) {
            this.producer = producer;
            this.request = request;
            this.kind = kind;
            this.topic = request.getString("topic");
            this.random = new Random(request.getLongValue("seed"));
        }

        JSONArray run() throws Exception {
            int count = request.getIntValue("count");
            for (int i = 0; i < count; i++) {
                List<Message> messages = new ArrayList<>();
                int batch = kind.equals("batch") ? 1 + random.nextInt(20) : 1;
                for (int j = 0; j < batch; j++) {
                    messages.add(message(i * 100 + j));
                }
                try {
                    note(send(messages, i), messages);
                } catch (Exception failure) {
                    if (!request.getBooleanValue("keepGoing")) {
                        throw failure;
                    }
                    results.add(new JSONArray(failure.toString()));
                }
            }
            return results;
        }

        private Message message(int number) {
            int size = 1 + random.nextInt(request.getIntValue("size", 500));
            byte[] body = new byte[kind.equals("compressed") ? size + 5000 : size];
            random.nextBytes(body);
            if (kind.equals("compressed")) {
                for (int i = 0; i < body.length; i++) {
                    body[i] = (byte) ('a' + (body[i] & 3));
                }
            }
            Message message = new Message(topic, body);
            if (number % 3 != 0) {
                message.setKeys("key" + number % 50 + (number % 7 == 0 ? " second" + number : ""));
            }
            if (number % 2 == 0) {
                message.setTags("tag" + number % 5);
            }
            message.putUserProperty("number", String.valueOf(number));
            message.putUserProperty("\u00fcml\u00e4ut", "\u65e5\u672c \ud83d\ude80");
            if (kind.equals("delayed")) {
                int level = request.getIntValue("delayLevel", 1 + number / 100 % 2);
                message.setDelayTimeLevel(level);
            }
            return message;
        }

        private SendResult send(List<Message> messages, int number) throws Exception {
            Message first = messages.get(0);
            switch (kind) {
                case "batch":
                    return producer.send(messages);
                case "transactional":
                    return ((TransactionMQProducer) producer)
                        .sendMessageInTransaction(first, number);
                case "ordered":
                    return producer.send(first,
                        (queues, message, key) -> queues.get((Integer) key % queues.size()),
                        number % 3);
                default:
                    return producer.send(first);
            }
        }

        private void note(SendResult sent, List<Message> messages) {
            for (Message message : messages) {
                JSONArray one = new JSONArray();
                one.add(sent.getSendStatus().name());
                one.add(sent.getMessageQueue().getQueueId());
                one.add(sent.getQueueOffset());
                one.add(Lines.sha1(message.getBody()));
                results.add(one);
            }
        }
    }

    /** Read `topics` with a push consumer until `count` messages arrived; write a line for each. */
    private Object consume(JSONObject request) throws Exception {
        String group = request.getString("group");
        DefaultMQPushConsumer consumer =
            new DefaultMQPushConsumer(group == null ? "consumers-" + instance() : group);
        consumer.setInstanceName(instance());
        consumer.setNamesrvAddr(request.getString("namesrv"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(1024);
        consumer.setConsumeMessageBatchMaxSize(1024);
        consumer.setPullThresholdForQueue(20_000);
        consumer.setConsumeThreadMin(2);
        consumer.setConsumeThreadMax(2);
        // The position follows after the listener has returned: wait for that before it is stored.
        consumer.setAwaitTerminationMillisWhenShutdown(30_000);
        Map<String, String> seen = new ConcurrentHashMap<>();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                seen.put(message.getTopic() + message.getQueueId() + ":" + message.getQueueOffset(),
                    Lines.of(message));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        JSONArray topics = request.getJSONArray("topics");
        for (int i = 0; i < topics.size(); i++) {
            consumer.subscribe(topics.getString(i), "*");
        }
        consumer.start();
        try {
            long deadline = System.nanoTime() + request.getLongValue("timeout", 60) * 1_000_000_000L;
            while (seen.size() < request.getIntValue("count") && System.nanoTime() < deadline) {
                Thread.sleep(50);
            }
        } finally {
            consumer.shutdown();
        }
        try (Writer out = Files.newBufferedWriter(Path.of(request.getString("file")),
            StandardCharsets.UTF_8)) {
            for (String line : seen.values()) {
                out.write(line);
            }
        }
        return seen.size();
    }

    /** Pull once from a queue's offset 0; return [status, number of messages]. */
    private Object pull(JSONObject request) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("pullers");
        consumer.setInstanceName(instance());
        consumer.setNamesrvAddr(request.getString("namesrv"));
        consumer.start();
        try {
            MessageQueue queue = new MessageQueue(request.getString("topic"),
                request.getString("broker"), request.getIntValue("queue"));
            PullResult result = consumer.pull(queue, "*", 0, 32);
            List<MessageExt> found = result.getMsgFoundList();
            return List.of(result.getPullStatus().name(), found == null ? 0 : found.size());
        } finally {
            consumer.shutdown();
        }
    }
}
