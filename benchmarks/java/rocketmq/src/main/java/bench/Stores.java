package bench;

import com.alibaba.fastjson2.JSONObject;
import java.net.InetSocketAddress;
import java.util.Random;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.MessageStore;
import org.apache.rocketmq.store.PutMessageStatus;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** A bare DefaultMessageStore, without a broker around it; `store.status` serves a broker's too. */
final class Stores {
    /** The store that is open in this process: its own, or its broker's. */
    static volatile MessageStore current;

    void addTo(Bench bench) {
        bench.add("store.open", this::open);
        bench.add("store.put", this::put);
        bench.add("store.status", this::status);
        bench.add("store.close", this::close);
    }

    private Object open(JSONObject request) throws Exception {
        BrokerConfig broker = Settings.broker(request);
        DefaultMessageStore store = new DefaultMessageStore(Settings.store(request),
            new BrokerStatsManager(broker),
            (topic, queueId, offset, tags, time, bits, properties) -> { }, broker,
            new ConcurrentHashMap<String, TopicConfig>());
        if (!store.load()) {
            throw new IllegalStateException("RocketMQ refuses to load this store");
        }
        store.start();
        if (request.getString("master") != null) {
            store.updateHaMasterAddress(request.getString("master"));
        }
        current = store;
        return status(request);
    }

    private Object close(JSONObject request) {
        current.shutdown();
        return true;
    }

    /** Put from `threads` threads; seconds. */
    private Object put(JSONObject request) throws Exception {
        byte[] body = new byte[request.getIntValue("size")];
        new Random(1).nextBytes(body);
        InetSocketAddress host = new InetSocketAddress("127.0.0.1", 10911);
        MessageStore store = current;
        return Load.race(request.getIntValue("threads"), request.getIntValue("count"), number -> {
            MessageExtBrokerInner message = new MessageExtBrokerInner();
            message.setTopic(request.getString("topic"));
            message.setQueueId(number & 3);
            message.setBody(body);
            message.setBornTimestamp(System.currentTimeMillis());
            message.setBornHost(host);
            message.setStoreHost(host);
            message.setPropertiesString("");
            PutMessageStatus status = store.putMessage(message).getPutMessageStatus();
            if (status != PutMessageStatus.PUT_OK) {
                throw new IllegalStateException("a put ended as " + status);
            }
        });
    }

    private Object status(JSONObject request) {
        JSONObject status = new JSONObject();
        status.put("max", current.getMaxPhyOffset());
        status.put("behind", current.dispatchBehindBytes());
        status.put("reported", current.getHaService().getPush2SlaveMaxOffset().get());
        status.put("slaves", current.getHaService().getConnectionCount().get());
        return status;
    }
}
