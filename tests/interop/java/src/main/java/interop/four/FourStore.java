package interop.four;

import com.alibaba.fastjson2.JSONObject;
import interop.Peer;
import interop.StoreOperations;
import java.lang.reflect.Field;
import java.net.InetSocketAddress;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.MessageExtBrokerInner;
import org.apache.rocketmq.store.MessageStore;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.ha.HAService;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** The store of RocketMQ 4, without a broker: Maven Central has none of 4.9.8. */
public final class FourStore extends StoreOperations {
    public static void addTo(Peer peer) {
        new FourStore().addOperations(peer);
    }

    @Override
    protected DefaultMessageStore make(MessageStoreConfig config, BrokerConfig broker)
        throws Exception {
        DefaultMessageStore store = new DefaultMessageStore(config,
            new BrokerStatsManager("interop", false),
            (topic, queueId, offset, tags, time, bits, properties) -> { }, broker);
        listenOnLoopback(store.getHaService(), config.getHaListenPort());
        return store;
    }

    /** Make the acceptor listen on 127.0.0.1; the original listens on every interface. */
    private static void listenOnLoopback(HAService service, int port) throws Exception {
        Field acceptor = HAService.class.getDeclaredField("acceptSocketService");
        acceptor.setAccessible(true);
        Object found = acceptor.get(service);
        Field address = found.getClass().getDeclaredField("socketAddressListen");
        address.setAccessible(true);
        address.set(found, new InetSocketAddress("127.0.0.1", port));
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
        ((DefaultMessageStore) store).getConsumeQueueTable()
            .forEach((topic, found) -> queues.put(topic, found.keySet()));
        return queues;
    }

    @Override
    protected void addStatus(MessageStore store, JSONObject status) {
        HAService service = ((DefaultMessageStore) store).getHaService();
        status.put("push2slave", service.getPush2SlaveMaxOffset().get());
        status.put("slaves", service.getConnectionCount().get());
    }
}
