package bench;

import com.alibaba.fastjson2.JSONObject;
import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** RocketMQ's official pull consumer. */
final class Reading {
    private int instances;

    void addTo(Bench bench) {
        bench.add("consume", this::consume);
    }

    /** Read `count` messages of a topic from its beginning; seconds from the first poll on. */
    private Object consume(JSONObject request) throws Exception {
        int batch = request.getIntValue("batch");
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("reading" + instances);
        consumer.setInstanceName("reading" + instances++);
        consumer.setNamesrvAddr(request.getString("namesrv"));
        consumer.setVipChannelEnabled(false);
        consumer.setAutoCommit(false);
        consumer.setPullBatchSize(batch);
        consumer.setPullThreadNums(request.getIntValue("queues"));
        consumer.setPullThresholdForQueue(4 * batch);
        consumer.setPullThresholdForAll(16 * batch);
        consumer.start();
        try {
            List<MessageQueue> queues = new ArrayList<>();
            for (int i = 0; i < request.getIntValue("queues"); i++) {
                queues.add(new MessageQueue(request.getString("topic"), "rocketmq", i));
            }
            long began = System.nanoTime();
            consumer.assign(queues);
            for (MessageQueue queue : queues) {
                consumer.seek(queue, 0);
            }
            long left = request.getLongValue("count");
            long bytes = 0;
            long deadline = began + 120_000_000_000L;
            while (left > 0) {
                for (MessageExt message : consumer.poll(1_000)) {
                    bytes += message.getBody().length;
                    left--;
                }
                if (System.nanoTime() > deadline) {
                    throw new IllegalStateException(left + " messages did not come");
                }
            }
            JSONObject result = new JSONObject();
            result.put("seconds", (System.nanoTime() - began) / 1e9);
            result.put("bytes", bytes);
            return result;
        } finally {
            consumer.shutdown();
        }
    }
}
