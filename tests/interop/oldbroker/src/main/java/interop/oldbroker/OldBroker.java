package interop.oldbroker;

import com.alibaba.fastjson2.JSONObject;
import interop.Peer;
import interop.Settings;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.store.config.BrokerRole;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** A name server and a complete broker of RocketMQ 4.9. */
public final class OldBroker {
    private NamesrvController nameServer;
    private BrokerController broker;

    private OldBroker() {
    }

    public static void addTo(Peer peer) {
        // As its start scripts do; without it the name server takes no topics from the broker.
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY,
            Integer.toString(MQVersion.CURRENT_VERSION));
        OldBroker made = new OldBroker();
        peer.add("namesrv.start", made::startNameServer);
        peer.add("broker.start", made::startBroker);
        peer.add("broker.stop", made::stopBroker);
        peer.add("store.status", made::status);
    }

    private static NettyServerConfig listening(int port) {
        NettyServerConfig config = new NettyServerConfig();
        config.setListenPort(port);
        config.setServerSelectorThreads(1);
        config.setServerWorkerThreads(2);
        return config;
    }

    private Object startNameServer(JSONObject request) throws Exception {
        NamesrvConfig config = new NamesrvConfig();
        config.setRocketmqHome(System.getProperty("user.home"));
        config.setKvConfigPath(System.getProperty("user.home") + "/kvConfig.json");
        nameServer = new NamesrvController(config, listening(request.getIntValue("port")));
        if (!nameServer.initialize()) {
            throw new IllegalStateException("the name server does not initialize");
        }
        nameServer.start();
        return true;
    }

    private Object startBroker(JSONObject request) throws Exception {
        MessageStoreConfig store = Settings.store(request);
        BrokerConfig config = Settings.broker(request);
        config.setWaitTimeMillsInSendQueue(60_000);
        store.setOsPageCacheBusyTimeOutMills(60_000);
        if (store.getBrokerRole() != BrokerRole.SLAVE) {
            config.setBrokerId(0);
        }
        int port = request.getJSONObject("broker").getIntValue("listenPort");
        broker = new BrokerController(config, listening(port), new NettyClientConfig(), store);
        if (!broker.initialize()) {
            throw new IllegalStateException("RocketMQ's broker does not initialize");
        }
        broker.start();
        return true;
    }

    private Object stopBroker(JSONObject request) {
        broker.shutdown();
        broker = null;
        return true;
    }

    private Object status(JSONObject request) {
        JSONObject status = new JSONObject();
        status.put("max", broker.getMessageStore().getMaxPhyOffset());
        return status;
    }
}
