package hastore.clients;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Producers by name: each way to send, and the queries that each client offers (MQAdmin). */
final class Producers {
    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();

    void addTo(Clients clients) {
        clients.add("producer.start", this::start);
        clients.add("producer.stop", this::stop);
        clients.add("producer.queues", this::queues);
        clients.add("send", this::send);
        clients.add("query.key", this::byKey);
        clients.add("query.id", this::byId);
        clients.add("query.offsets", this::offsets);
    }

    DefaultMQProducer of(JSONObject request) {
        DefaultMQProducer producer = producers.get(request.getString("name"));
        if (producer == null) {
            throw new IllegalArgumentException("no producer " + request.getString("name"));
        }
        return producer;
    }

    private Object start(JSONObject request) throws Exception {
        String group = request.getString("group");
        group = group == null ? "producers" : group;
        DefaultMQProducer producer = request.getBooleanValue("transactions")
            ? transactional(group, request)
            : new DefaultMQProducer(group, Messages.signing(request));
        Messages.configure(producer, request);
        if (request.containsKey("api_timeout_ms")) { // for questions, as for a topic's route
            producer.setMqClientApiTimeout(request.getIntValue("api_timeout_ms"));
        }
        if (request.containsKey("timeout_ms")) {
            producer.setSendMsgTimeout(request.getIntValue("timeout_ms"));
        }
        if (request.containsKey("retries")) {
            producer.setRetryTimesWhenSendFailed(request.getIntValue("retries"));
            producer.setRetryTimesWhenSendAsyncFailed(request.getIntValue("retries"));
        }
        if (request.containsKey("latency_fault")) {
            producer.setSendLatencyFaultEnable(request.getBooleanValue("latency_fault"));
        }
        if (request.containsKey("topic_queues")) {
            producer.setDefaultTopicQueueNums(request.getIntValue("topic_queues"));
        }
        producer.start();
        producers.put(request.getString("name"), producer);
        return true;
    }

    /** The argument of a send says how the transaction ends; what is unknown stays so. */
    private static TransactionMQProducer transactional(String group, JSONObject request)
            throws Exception {
        TransactionMQProducer producer =
            new TransactionMQProducer(group, Messages.signing(request));
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object state) {
                return LocalTransactionState.valueOf(String.valueOf(state));
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                String state = message.getUserProperty("whenChecked");
                return LocalTransactionState.valueOf(state == null ? "UNKNOW" : state);
            }
        });
        return producer;
    }

    private Object stop(JSONObject request) {
        of(request).shutdown();
        producers.remove(request.getString("name"));
        return true;
    }

    /** Return [topic, broker, queue] of each queue that the producer sends to. */
    private Object queues(JSONObject request) throws Exception {
        JSONArray found = new JSONArray();
        for (MessageQueue queue : of(request).fetchPublishMessageQueues(request.getString("topic"))) {
            found.add(Messages.of(queue));
        }
        return found;
    }

    /** Send `messages` as `how` says; return a result for each, or for the batch. */
    private Object send(JSONObject request) {
        DefaultMQProducer producer = of(request);
        String how = request.getString("how");
        List<Message> messages = new ArrayList<>();
        for (Object one : request.getJSONArray("messages")) {
            messages.add(Messages.of((JSONObject) one));
        }
        JSONArray results = new JSONArray();
        if ("batch".equals(how)) {
            results.add(attempt(() -> producer.send(messages)));
            return results;
        }
        for (Message message : messages) {
            results.add(attempt(() -> sendOne(producer, how, message, request)));
        }
        return results;
    }

    private interface Sending {
        SendResult run() throws Exception;
    }

    private static JSONObject attempt(Sending sending) {
        try {
            SendResult sent = sending.run();
            return sent == null ? JSONObject.of("status", "ONE_WAY") : Messages.of(sent);
        } catch (Exception failure) {
            return Messages.of(failure);
        }
    }

    private static SendResult sendOne(DefaultMQProducer producer, String how, Message message,
            JSONObject request) throws Exception {
        switch (how == null ? "sync" : how) {
            case "sync":
                return producer.send(message);
            case "async":
                return sendAsync(producer, message);
            case "oneway":
                producer.sendOneway(message);
                return null;
            case "queue":
                return producer.send(message, Messages.queue(request));
            case "ordered":
                return producer.send(message, (queues, one, key) ->
                    queues.get((Integer) key % queues.size()), request.getIntValue("key"));
            case "transaction":
                return ((TransactionMQProducer) producer)
                    .sendMessageInTransaction(message, request.getString("state"));
            default:
                throw new IllegalArgumentException("no way to send: " + how);
        }
    }

    private static SendResult sendAsync(DefaultMQProducer producer, Message message)
            throws Exception {
        CountDownLatch done = new CountDownLatch(1);
        SendResult[] sent = new SendResult[1];
        Throwable[] failed = new Throwable[1];
        producer.send(message, new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                sent[0] = result;
                done.countDown();
            }

            @Override
            public void onException(Throwable failure) {
                failed[0] = failure;
                done.countDown();
            }
        });
        if (!done.await(60, TimeUnit.SECONDS)) {
            throw new IllegalStateException("the callback was not called");
        }
        if (failed[0] instanceof Exception) {
            throw (Exception) failed[0];
        }
        return sent[0];
    }

    private Object byKey(JSONObject request) throws Exception {
        JSONArray found = new JSONArray();
        for (MessageExt message : of(request).queryMessage(request.getString("topic"),
                request.getString("key"), request.getIntValue("max", 32),
                request.getLongValue("begin", 0),
                request.getLongValue("end", Long.MAX_VALUE)).getMessageList()) {
            found.add(Messages.of(message));
        }
        return found;
    }

    private Object byId(JSONObject request) throws Exception {
        return Messages.of(
            of(request).viewMessage(request.getString("topic"), request.getString("message")));
    }

    private Object offsets(JSONObject request) throws Exception {
        DefaultMQProducer producer = of(request);
        MessageQueue queue = Messages.queue(request);
        JSONObject result = new JSONObject();
        result.put("min", producer.minOffset(queue));
        result.put("max", producer.maxOffset(queue));
        result.put("earliest", producer.earliestMsgStoreTime(queue));
        if (request.containsKey("time")) {
            result.put("at", producer.searchOffset(queue, request.getLongValue("time")));
        }
        return result;
    }
}
