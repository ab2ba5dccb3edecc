package bench;

import com.alibaba.fastjson2.JSONObject;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.store.config.BrokerRole;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** A name server and a complete broker. */
final class Servers {
    private BrokerController broker;
    private MessageStoreConfig store;

    void addTo(Bench bench) {
        bench.add("namesrv.start", this::startNameServer);
        bench.add("broker.start", this::startBroker);
        bench.add("broker.stop", this::stopBroker);
        bench.add("broker.topic", this::addTopic);
        bench.add("broker.role", this::changeRole);
    }

    private static NettyServerConfig loopback(int port) {
        NettyServerConfig config = new NettyServerConfig();
        config.setBindAddress("127.0.0.1");
        config.setListenPort(port);
        return config;
    }

    private Object startNameServer(JSONObject request) throws Exception {
        NamesrvConfig config = new NamesrvConfig();
        config.setRocketmqHome(System.getProperty("user.home"));
        config.setKvConfigPath(System.getProperty("user.home") + "/kvConfig.json");
        NamesrvController server = new NamesrvController(config, loopback(request.getIntValue("port")));
        if (!server.initialize()) {
            throw new IllegalStateException("the name server does not initialize");
        }
        server.start();
        return true;
    }

    private Object startBroker(JSONObject request) throws Exception {
        store = Settings.store(request);
        BrokerConfig config = Settings.broker(request);
        broker = new BrokerController(config, loopback(config.getListenPort()),
            new NettyClientConfig(), store);
        if (!broker.initialize()) {
            throw new IllegalStateException("RocketMQ's broker does not initialize");
        }
        broker.start();
        if (store.getHaMasterAddress() != null) { // 5.3.3 loses the address if it is set before the client exists
            broker.getMessageStore().updateHaMasterAddress(store.getHaMasterAddress());
        }
        Stores.current = broker.getMessageStore();
        return true;
    }

    private Object stopBroker(JSONObject request) {
        broker.shutdown();
        return true;
    }

    private Object addTopic(JSONObject request) {
        int queues = request.getIntValue("queues");
        TopicConfig topic = new TopicConfig(request.getString("topic"), queues, queues, 6);
        broker.getTopicConfigManager().updateTopicConfig(topic);
        broker.registerBrokerAll(false, false, true);
        return true;
    }

    /** Set whether puts wait for the slave: the store checks its role for each put. */
    private Object changeRole(JSONObject request) {
        store.setBrokerRole(BrokerRole.valueOf(request.getString("role")));
        return true;
    }
}
