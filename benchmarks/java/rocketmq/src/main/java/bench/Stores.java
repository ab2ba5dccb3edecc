package bench;

import com.alibaba.fastjson2.JSONObject;
import java.net.InetSocketAddress;
import java.util.HashMap;
import java.util.Random;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.BooleanSupplier;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.MessageStore;
import org.apache.rocketmq.store.PutMessageStatus;
import org.apache.rocketmq.store.ha.HAClient;
import org.apache.rocketmq.store.ha.HAConnectionState;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** A bare DefaultMessageStore without a broker; `store.status` also works for a broker's store. */
final class Stores {
    /** The open store of this process: a bare one, or its broker's. */
    static volatile MessageStore current;

    void addTo(Bench bench) {
        bench.add("store.open", this::open);
        bench.add("store.follow", this::follow);
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

    /**
     * Wait until the slave's store has the master's log up to `end`. Return the seconds from the
     * connection to the last byte, and until its queues and index are complete.
     */
    private Object follow(JSONObject request) throws Exception {
        long end = request.getLongValue("end");
        HAClient client = current.getHaService().getHAClient();
        client.wakeup(); // it started without an address, and would sleep for 5 s
        await(() -> client.getCurrentState() == HAConnectionState.TRANSFER);
        long began = System.nanoTime();
        await(() -> current.getMaxPhyOffset() >= end);
        long all = System.nanoTime();
        await(() -> current.dispatchBehindBytes() == 0);
        JSONObject result = new JSONObject();
        result.put("seconds", (all - began) / 1e9);
        result.put("caught_up_seconds", (System.nanoTime() - began) / 1e9);
        return result;
    }

    private static void await(BooleanSupplier what) throws InterruptedException {
        long deadline = System.nanoTime() + 120_000_000_000L;
        while (!what.getAsBoolean()) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException("the slave did not get there in time");
            }
            Thread.sleep(1);
        }
    }

    private Object close(JSONObject request) {
        current.shutdown();
        return true;
    }

    /** Put with `threads` threads; return the seconds. */
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
            MessageAccessor.setProperties(message, new HashMap<>());
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
