package hastore.clients;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/** Push consumers by name, which keep what they receive. */
final class PushConsumers {
    private final Map<String, Receiver> receivers = new ConcurrentHashMap<>();

    void addTo(Clients clients) {
        clients.add("push.start", this::start);
        clients.add("push.wait", request -> of(request).await(request));
        clients.add("push.numbers", request -> of(request).numbers());
        clients.add("push.count", request -> of(request).size());
        clients.add("push.stop", this::stop);
    }

    private Receiver of(JSONObject request) {
        Receiver receiver = receivers.get(request.getString("name"));
        if (receiver == null) {
            throw new IllegalArgumentException("no consumer " + request.getString("name"));
        }
        return receiver;
    }

    private Object start(JSONObject request) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
            request.getString("group"), Messages.signing(request),
            new AllocateMessageQueueAveragely());
        Messages.configure(consumer, request);
        consumer.setConsumeFromWhere(request.containsKey("from")
            ? ConsumeFromWhere.valueOf(request.getString("from"))
            : ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        if (request.getBooleanValue("broadcasting")) {
            Messages.set(consumer, "setMessageModel", "BROADCASTING");
        }
        if (request.containsKey("max_reconsume")) {
            consumer.setMaxReconsumeTimes(request.getIntValue("max_reconsume"));
        }
        if (request.containsKey("batch")) {
            consumer.setConsumeMessageBatchMaxSize(request.getIntValue("batch"));
        }
        if (request.containsKey("suspend_ms")) {
            consumer.setSuspendCurrentQueueTimeMillis(request.getIntValue("suspend_ms"));
        }
        consumer.setConsumeThreadMin(request.getIntValue("threads", 4));
        consumer.setConsumeThreadMax(request.getIntValue("threads", 4));
        Receiver receiver = new Receiver(consumer, request);
        if (request.getBooleanValue("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) ->
                receiver.take(messages, context.getMessageQueue().getQueueId())
                    ? ConsumeOrderlyStatus.SUCCESS
                    : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT);
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                context.setDelayLevelWhenNextConsume(request.getIntValue("delay_level", 0));
                return receiver.take(messages, context.getMessageQueue().getQueueId())
                    ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
                    : ConsumeConcurrentlyStatus.RECONSUME_LATER;
            });
        }
        for (Object topic : request.getJSONArray("topics")) {
            consumer.subscribe(String.valueOf(topic), selector(request));
        }
        consumer.start();
        receivers.put(request.getString("name"), receiver);
        return true;
    }

    private static MessageSelector selector(JSONObject request) {
        if (request.containsKey("sql")) {
            return MessageSelector.bySql(request.getString("sql"));
        }
        String expression = request.getString("expression");
        return MessageSelector.byTag(expression == null ? "*" : expression);
    }

    private Object stop(JSONObject request) {
        of(request).consumer.shutdown();
        receivers.remove(request.getString("name"));
        return true;
    }

    /** What one consumer received; with `compact` only [body up to the first blank, ms]. */
    private static final class Receiver {
        private final DefaultMQPushConsumer consumer;
        private final boolean compact;
        private final int refusals;
        private final JSONArray received = new JSONArray();
        private final Map<String, Integer> refused = new ConcurrentHashMap<>();

        Receiver(DefaultMQPushConsumer consumer, JSONObject request) {
            this.consumer = consumer;
            this.compact = request.getBooleanValue("compact");
            this.refusals = request.getIntValue("refuse", 0);
        }

        /** Keep messages; return whether they count as consumed: not the first `refuse` times. */
        boolean take(List<MessageExt> messages, int queue) {
            boolean good = true;
            double now = Clients.nowMs();
            List<Object> kept = new ArrayList<>(messages.size());
            for (MessageExt message : messages) {
                if (compact) {
                    kept.add(JSONArray.of(head(message.getBody()), now));
                } else {
                    JSONObject one = Messages.of(message);
                    one.put("ms", now);
                    one.put("context_queue", queue);
                    kept.add(one);
                }
                if (refusals > 0 && refused.merge(bodyOf(message), 1, Integer::sum) <= refusals) {
                    good = false;
                }
            }
            synchronized (received) {
                received.addAll(kept);
                received.notifyAll();
            }
            return good;
        }

        private static String bodyOf(MessageExt message) {
            return new String(message.getBody(), StandardCharsets.UTF_8);
        }

        private static String head(byte[] body) {
            int end = 0;
            while (end < body.length && body[end] != ' ') {
                end++;
            }
            return new String(body, 0, end, StandardCharsets.UTF_8);
        }

        int size() {
            synchronized (received) {
                return received.size();
            }
        }

        /** Return all that was received, once it is `count` messages or the time is over. */
        Object await(JSONObject request) throws InterruptedException {
            double deadline = Clients.nowMs() + 1000 * request.getDoubleValue("limit_s");
            synchronized (received) {
                while (received.size() < request.getIntValue("count")) {
                    long left = (long) (deadline - Clients.nowMs());
                    if (left <= 0) {
                        break;
                    }
                    received.wait(left);
                }
                return new JSONArray(received);
            }
        }

        Object numbers() {
            synchronized (received) {
                return new JSONArray(received);
            }
        }
    }
}
