package interop.five;

import com.alibaba.fastjson2.JSONObject;
import interop.Peer;
import interop.Settings;
import interop.StoreOperations;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.filter.MessageEvaluationContext;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.filter.ExpressionType;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.namesrv.routeinfo.RouteInfoManager;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.route.QueueData;
import org.apache.rocketmq.store.config.BrokerRole;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** A name server and a complete broker. */
final class BrokerOperations {
    private NamesrvController nameServer;
    private BrokerController broker;

    void addTo(Peer peer) {
        peer.add("namesrv.start", this::startNameServer);
        peer.add("broker.start", this::startBroker);
        peer.add("broker.stop", this::stopBroker);
        peer.add("broker.topic", this::addTopic);
        peer.add("namesrv.topic", this::addRoute);
        peer.add("filter.matches", BrokerOperations::matches);
    }

    /** For each expression: null if it is none, else which of the records a consumer gets. */
    private static Object matches(JSONObject request) {
        List<List<Boolean>> answers = new ArrayList<>();
        for (Object each : request.getJSONArray("expressions")) {
            answers.add(matches(each.toString(), request.getJSONArray("records")));
        }
        return answers;
    }

    private static List<Boolean> matches(String text, List<Object> records) {
        Expression expression;
        try {
            expression = FilterFactory.INSTANCE.get(ExpressionType.SQL92).compile(text);
        } catch (Throwable refused) {
            return null;
        }
        List<Boolean> answers = new ArrayList<>();
        for (Object record : records) {
            Map<String, String> properties = new HashMap<>();
            ((JSONObject) record).forEach((name, value) -> properties.put(name, (String) value));
            try { // as ExpressionMessageFilter does
                Object found = expression.evaluate(new MessageEvaluationContext(properties));
                answers.add(Boolean.TRUE.equals(found));
            } catch (Throwable withoutMeaning) {
                answers.add(false);
            }
        }
        return answers;
    }

    private static NettyServerConfig loopback(int port) {
        NettyServerConfig config = new NettyServerConfig();
        config.setBindAddress("127.0.0.1");
        config.setListenPort(port);
        config.setServerSelectorThreads(1);
        config.setServerWorkerThreads(2);
        return config;
    }

    private Object startNameServer(JSONObject request) throws Exception {
        NamesrvConfig config = new NamesrvConfig();
        config.setRocketmqHome(System.getProperty("user.home"));
        config.setKvConfigPath(System.getProperty("user.home") + "/kvConfig.json");
        nameServer = new NamesrvController(config, loopback(request.getIntValue("port")));
        if (!nameServer.initialize()) {
            throw new IllegalStateException("the name server does not initialize");
        }
        nameServer.start();
        return true;
    }

    private Object startBroker(JSONObject request) throws Exception {
        // As BrokerStartup does: a master is told the version of its slave.
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY,
            Integer.toString(MQVersion.CURRENT_VERSION));
        MessageStoreConfig store = Settings.store(request);
        BrokerConfig config = Settings.broker(request);
        // By default a broker refuses sends that waited 200 ms, or while an append takes 1 s: a busy
        // machine alone would fail a test.
        config.setWaitTimeMillsInSendQueue(60_000);
        store.setOsPageCacheBusyTimeOutMills(60_000);
        if (store.getBrokerRole() != BrokerRole.SLAVE) {
            config.setBrokerId(0);
        }
        broker = new BrokerController(config, loopback(config.getListenPort()),
            new NettyClientConfig(), store);
        if (!broker.initialize()) {
            throw new IllegalStateException("RocketMQ's broker does not initialize");
        }
        broker.start();
        if (store.getHaMasterAddress() != null) { // 5.3.3 loses the address if it is set before the client exists
            broker.getMessageStore().updateHaMasterAddress(store.getHaMasterAddress());
        }
        StoreOperations.current = broker.getMessageStore();
        return true;
    }

    private Object stopBroker(JSONObject request) {
        broker.shutdown();
        broker = null;
        StoreOperations.current = null;
        return true;
    }

    private Object addTopic(JSONObject request) throws Exception {
        int queues = request.getIntValue("queues");
        TopicConfig topic = new TopicConfig(request.getString("topic"), queues, queues, 6);
        if (request.containsKey("type")) { // of the consume queues
            topic.setAttributes(new HashMap<>(Map.of("+queue.type", request.getString("type"))));
        }
        broker.getTopicConfigManager().updateTopicConfig(topic);
        broker.registerBrokerAll(false, false, true);
        if (nameServer != null && broker.getBrokerConfig().getBrokerId() == 0) {
            awaitRoute(topic.getTopicName(), null);
        }
        return true;
    }

    /** Wait until the broker is registered, by another thread: earlier topics would be dropped. */
    private void awaitRoute(String topic, List<QueueData> byHand) throws InterruptedException {
        RouteInfoManager routes = nameServer.getRouteInfoManager();
        for (int i = 0; i < 500; i++) {
            if (byHand != null) {
                routes.registerTopic(topic, byHand);
            }
            if (routes.pickupTopicRouteData(topic) != null) {
                return;
            }
            if (i % 10 == 9) {
                broker.registerBrokerAll(false, false, true);
            }
            Thread.sleep(20);
        }
        throw new IllegalStateException("the name server has no route of " + topic);
    }

    /** Register the route of a topic: a slave without a master registers none. */
    private Object addRoute(JSONObject request) throws InterruptedException {
        QueueData data = new QueueData();
        data.setBrokerName(request.getString("broker"));
        data.setReadQueueNums(request.getIntValue("queues"));
        data.setWriteQueueNums(request.getIntValue("queues"));
        data.setPerm(6);
        awaitRoute(request.getString("topic"), List.of(data));
        return true;
    }
}
