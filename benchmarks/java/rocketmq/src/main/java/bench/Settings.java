package bench;

import com.alibaba.fastjson2.JSONObject;
import java.util.Map;
import java.util.Properties;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** RocketMQ's own keys, as in its properties file; benchmarks/rocketmq.py has the values. */
final class Settings {
    private Settings() {
    }

    private static void apply(JSONObject values, Object target) {
        Properties properties = new Properties();
        for (Map.Entry<String, Object> one : values.entrySet()) {
            properties.setProperty(one.getKey(), String.valueOf(one.getValue()));
        }
        MixAll.properties2Object(properties, target);
    }

    static MessageStoreConfig store(JSONObject request) {
        MessageStoreConfig config = new MessageStoreConfig();
        apply(request.getJSONObject("store"), config);
        return config;
    }

    static BrokerConfig broker(JSONObject request) {
        BrokerConfig config = new BrokerConfig();
        config.setRocketmqHome(System.getProperty("user.home"));
        apply(request.getJSONObject("broker"), config);
        return config;
    }
}
