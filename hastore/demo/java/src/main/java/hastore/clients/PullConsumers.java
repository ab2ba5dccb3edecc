package hastore.clients;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** The lite pull consumer, and the old one, by name. */
@SuppressWarnings("deprecation") // the old pull consumer is still in use
final class PullConsumers {
    private final Map<String, DefaultLitePullConsumer> lite = new ConcurrentHashMap<>();
    private final Map<String, DefaultMQPullConsumer> old = new ConcurrentHashMap<>();

    void addTo(Clients clients) {
        clients.add("lite.start", this::startLite);
        clients.add("lite.poll", this::poll);
        clients.add("lite.queues", this::liteQueues);
        clients.add("lite.assign", this::assign);
        clients.add("lite.assignment", this::assignment);
        clients.add("lite.seek", this::seek);
        clients.add("lite.commit", this::commit);
        clients.add("lite.committed", this::committed);
        clients.add("lite.at", this::offsetForTime);
        clients.add("lite.stop", this::stopLite);
        clients.add("pull.start", this::startOld);
        clients.add("pull.queues", this::oldQueues);
        clients.add("pull.once", this::pullOnce);
        clients.add("pull.position", this::position);
        clients.add("pull.stop", this::stopOld);
    }

    private static <C> C get(Map<String, C> from, JSONObject request) {
        C consumer = from.get(request.getString("name"));
        if (consumer == null) {
            throw new IllegalArgumentException("no consumer " + request.getString("name"));
        }
        return consumer;
    }

    private Object startLite(JSONObject request) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(
            request.getString("group"), Messages.signing(request));
        Messages.configure(consumer, request);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(request.getBooleanValue("auto_commit", false));
        if (request.containsKey("batch")) {
            consumer.setPullBatchSize(request.getIntValue("batch"));
        }
        if (request.containsKey("topic")) {
            String expression = request.getString("expression");
            consumer.subscribe(request.getString("topic"), expression == null ? "*" : expression);
        }
        consumer.start();
        lite.put(request.getString("name"), consumer);
        return true;
    }

    /** Poll until `count` messages came or `limit_s` is over; return them. */
    private Object poll(JSONObject request) {
        DefaultLitePullConsumer consumer = get(lite, request);
        JSONArray found = new JSONArray();
        double deadline = Clients.nowMs() + 1000 * request.getDoubleValue("limit_s");
        while (found.size() < request.getIntValue("count") && Clients.nowMs() < deadline) {
            for (MessageExt message : consumer.poll(200)) {
                found.add(Messages.of(message));
            }
        }
        return found;
    }

    private Object liteQueues(JSONObject request) throws Exception {
        JSONArray found = new JSONArray();
        for (MessageQueue queue : get(lite, request).fetchMessageQueues(request.getString("topic"))) {
            found.add(Messages.of(queue));
        }
        return found;
    }

    private Object assign(JSONObject request) throws Exception {
        List<MessageQueue> queues =
            new ArrayList<>(get(lite, request).fetchMessageQueues(request.getString("topic")));
        get(lite, request).assign(queues);
        return queues.size();
    }

    private Object assignment(JSONObject request) throws Exception {
        return get(lite, request).assignment().size();
    }

    private Object seek(JSONObject request) throws Exception {
        get(lite, request).seek(Messages.queue(request), request.getLongValue("offset"));
        return true;
    }

    private Object commit(JSONObject request) {
        get(lite, request).commitSync();
        return true;
    }

    private Object committed(JSONObject request) throws Exception {
        return get(lite, request).committed(Messages.queue(request));
    }

    private Object offsetForTime(JSONObject request) throws Exception {
        return get(lite, request)
            .offsetForTimestamp(Messages.queue(request), request.getLongValue("time"));
    }

    private Object stopLite(JSONObject request) {
        get(lite, request).shutdown();
        lite.remove(request.getString("name"));
        return true;
    }

    private Object startOld(JSONObject request) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(
            request.getString("group"), Messages.signing(request));
        Messages.configure(consumer, request);
        consumer.start();
        old.put(request.getString("name"), consumer);
        return true;
    }

    private Object oldQueues(JSONObject request) throws Exception {
        JSONArray found = new JSONArray();
        for (MessageQueue queue
                : get(old, request).fetchSubscribeMessageQueues(request.getString("topic"))) {
            found.add(Messages.of(queue));
        }
        return found;
    }

    private Object pullOnce(JSONObject request) {
        DefaultMQPullConsumer consumer = get(old, request);
        String expression = request.getString("expression");
        expression = expression == null ? "*" : expression;
        long offset = request.getLongValue("offset");
        int max = request.getIntValue("max", 32);
        try {
            PullResult result = request.getBooleanValue("block")
                ? consumer.pullBlockIfNotFound(Messages.queue(request), expression, offset, max)
                : consumer.pull(Messages.queue(request), expression, offset, max);
            JSONArray found = new JSONArray();
            if (result.getMsgFoundList() != null) {
                result.getMsgFoundList().forEach(message -> found.add(Messages.of(message)));
            }
            return JSONObject.of("status", result.getPullStatus().name(),
                "next", result.getNextBeginOffset(), "min", result.getMinOffset(),
                "max", result.getMaxOffset()).fluentPut("messages", found);
        } catch (Exception failure) {
            return Messages.of(failure);
        }
    }

    /** Set the group's position if `offset` is given; return what the server has. */
    private Object position(JSONObject request) throws Exception {
        DefaultMQPullConsumer consumer = get(old, request);
        MessageQueue queue = Messages.queue(request);
        if (request.containsKey("offset")) {
            consumer.updateConsumeOffset(queue, request.getLongValue("offset"));
            consumer.getOffsetStore().persist(queue);
        }
        return consumer.fetchConsumeOffset(queue, true);
    }

    private Object stopOld(JSONObject request) {
        get(old, request).shutdown();
        old.remove(request.getString("name"));
        return true;
    }
}
