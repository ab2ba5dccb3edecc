package interop;

import com.alibaba.fastjson2.JSONObject;
import java.util.Map;
import java.util.Properties;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/**
 * The configuration of a store or a broker: RocketMQ's own keys, as in its properties file. As there,
 * a key that the version does not know is ignored.
 */
public final class Settings {
    private static final Map<String, Object> STORE = Map.of(
        "enableCompaction", false,
        "timerWheelEnable", false,
        "transientStorePoolEnable", false,
        "cleanResourceInterval", 3_600_000,
        "fileReservedTime", 24 * 365,
        "diskMaxUsedSpaceRatio", 95,
        "timerFlushIntervalMs", 30_000); // by default it compares its 37 MiB byte by byte once a second
    private static final Map<String, Object> BROKER = Map.of(
        "brokerIP1", "127.0.0.1",
        "brokerIP2", "127.0.0.1",
        "brokerName", "rocketmq",
        "slaveReadEnable", true,
        "transactionOpBatchInterval", 100, // most delay before the end of a transaction is logged, by default 3 s
        "transactionCheckInterval", 3_600_000, // else open half messages are written again after 30 s
        "transactionMetricFlushInterval", 500, // until it is over for the first time, a thread of 5.3.3 spins: 10 s
        "enableDetailStat", false,
        "enableCalcFilterBitMap", false);

    private Settings() {
    }

    private static void apply(Map<String, Object> values, Object target) {
        if (values == null) {
            return;
        }
        Properties properties = new Properties();
        for (Map.Entry<String, Object> one : values.entrySet()) {
            properties.setProperty(one.getKey(), String.valueOf(one.getValue()));
        }
        MixAll.properties2Object(properties, target);
    }

    public static MessageStoreConfig store(JSONObject request) {
        MessageStoreConfig config = new MessageStoreConfig();
        apply(STORE, config);
        apply(request.getJSONObject("store"), config);
        return config;
    }

    public static BrokerConfig broker(JSONObject request) {
        BrokerConfig config = new BrokerConfig();
        apply(BROKER, config);
        config.setRocketmqHome(System.getProperty("user.home"));
        apply(request.getJSONObject("broker"), config);
        return config;
    }
}
