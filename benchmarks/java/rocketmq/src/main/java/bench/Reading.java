package bench;

import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** RocketMQ's official pull consumer. */
final class Reading {
    private int instances;

    void addTo(Bench bench) {
        bench.add("consume.pull", this::pull);
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
}
