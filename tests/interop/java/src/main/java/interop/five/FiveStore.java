package interop.five;

import com.alibaba.fastjson2.JSONObject;
import interop.Peer;
import interop.StoreOperations;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.MessageStore;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** The operations of RocketMQ 5: a store, a broker, a name server and the official clients. */
public final class FiveStore extends StoreOperations {
    public static void addTo(Peer peer) {
        new FiveStore().addOperations(peer);
        new BrokerOperations().addTo(peer);
        new ClientOperations().addTo(peer);
        new DLedgerOperations().addTo(peer);
    }

    @Override
    protected DefaultMessageStore make(MessageStoreConfig config, BrokerConfig broker)
        throws Exception {
        return new DefaultMessageStore(config, new BrokerStatsManager(broker),
            (topic, queueId, offset, tags, time, bits, properties) -> { }, broker,
            new ConcurrentHashMap<String, TopicConfig>());
    }

    @Override
    protected PutMessageResult put(DefaultMessageStore store, JSONObject from) throws Exception {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        fill(message, from);
        message.setTagsCode(tagsCode(message));
        message.setPropertiesString(propertiesOf(message));
        return store.putMessage(message);
    }

    @Override
    protected Map<String, Set<Integer>> queues(MessageStore store) {
        Map<String, Set<Integer>> queues = new TreeMap<>();
        store.getQueueStore().getConsumeQueueTable()
            .forEach((topic, found) -> queues.put(topic, found.keySet()));
        return queues;
    }

    @Override
    protected void addStatus(MessageStore store, JSONObject status) {
        status.put("flushed", store.getFlushedWhere());
        if (store.getHaService() != null) {
            status.put("push2slave", store.getHaService().getPush2SlaveMaxOffset().get());
            status.put("slaves", store.getHaService().getConnectionCount().get());
        }
    }
}
