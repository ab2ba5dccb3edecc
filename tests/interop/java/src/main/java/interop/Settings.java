package interop;

import com.alibaba.fastjson2.JSONObject;
import java.util.Map;
import java.util.Properties;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** The configuration of a store or a broker: RocketMQ's own keys, as in its properties file. */
final class Settings {
    private Settings() {
    }

    static void apply(JSONObject values, Object target) {
        if (values == null) {
            return;
        }
        Properties properties = new Properties();
        for (Map.Entry<String, Object> one : values.entrySet()) {
            properties.setProperty(one.getKey(), String.valueOf(one.getValue()));
        }
        MixAll.properties2Object(properties, target);
    }

    static MessageStoreConfig store(JSONObject request) {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setEnableCompaction(false);
        config.setTimerWheelEnable(false);
        config.setTransientStorePoolEnable(false);
        config.setCleanResourceInterval(3_600_000);
        config.setFileReservedTime(24 * 365);
        config.setDiskMaxUsedSpaceRatio(95);
        apply(request.getJSONObject("store"), config);
        return config;
    }

    static BrokerConfig broker(JSONObject request) {
        BrokerConfig config = new BrokerConfig();
        config.setBrokerIP1("127.0.0.1");
        config.setBrokerIP2("127.0.0.1");
        config.setBrokerName("rocketmq");
        config.setRocketmqHome(System.getProperty("user.home"));
        config.setSlaveReadEnable(true);
        config.setEnableDetailStat(false);
        config.setEnableCalcFilterBitMap(false);
        apply(request.getJSONObject("broker"), config);
        return config;
    }
}
