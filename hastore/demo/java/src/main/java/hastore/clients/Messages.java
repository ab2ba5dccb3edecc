package hastore.clients;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.HexFormat;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;

/** Messages, results and queues as JSON, and what all clients have in common. */
final class Messages {
    private static final int SHOWN_BYTES = 400;
    private static int instances;

    private Messages() {
    }

    /** Set what every client needs: its servers, and a name of its own in this process. */
    static synchronized void configure(ClientConfig client, JSONObject request) {
        client.setNamesrvAddr(request.getString("namesrv"));
        String name = request.getString("instance");
        client.setInstanceName(name != null ? name
            : "client-" + ProcessHandle.current().pid() + "-" + instances++);
        client.setVipChannelEnabled(false);
        if (request.containsKey("poll_ms")) {
            client.setPollNameServerInterval(request.getIntValue("poll_ms"));
        }
        if (request.containsKey("heartbeat_ms")) {
            client.setHeartbeatBrokerInterval(request.getIntValue("heartbeat_ms"));
        }
        if (request.getBooleanValue("tls")) {
            client.setUseTLS(true);
        }
    }

    /** Return what signs the requests of a client with `access_key` and `secret_key`; else null.
     * Version 4 has it in a library of its own, which not every program here has. */
    static RPCHook signing(JSONObject request) throws Exception {
        String name = request.getString("access_key");
        if (name == null) {
            return null;
        }
        String place = "org.apache.rocketmq.acl.common.";
        Class<?> credentials = Class.forName(place + "SessionCredentials");
        Object own = credentials.getConstructor(String.class, String.class)
            .newInstance(name, request.getString("secret_key"));
        return (RPCHook) Class.forName(place + "AclClientRPCHook")
            .getConstructor(credentials).newInstance(own);
    }

    /** Call a setter whose parameter is an enumeration: its package changed between 4 and 5. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    static void set(Object client, String setter, String value) throws Exception {
        for (Method method : client.getClass().getMethods()) {
            if (method.getName().equals(setter) && method.getParameterCount() == 1
                    && method.getParameterTypes()[0].isEnum()) {
                Class type = method.getParameterTypes()[0];
                method.invoke(client, Enum.valueOf(type, value));
                return;
            }
        }
        throw new IllegalArgumentException("no setter " + setter);
    }

    /** Return the message that a request describes; `repeat` makes a body that compresses well. */
    static Message of(JSONObject from) {
        String text = from.getString("body");
        int repeat = from.getIntValue("repeat", 1);
        byte[] body = (text == null ? "" : text.repeat(repeat)).getBytes(StandardCharsets.UTF_8);
        Message message = new Message(from.getString("topic"), body);
        if (from.containsKey("tags")) {
            message.setTags(from.getString("tags"));
        }
        if (from.containsKey("keys")) {
            message.setKeys(from.getString("keys"));
        }
        if (from.containsKey("delay")) {
            message.setDelayTimeLevel(from.getIntValue("delay"));
        }
        message.setFlag(from.getIntValue("flag", 0));
        message.setWaitStoreMsgOK(from.getBooleanValue("wait", true));
        JSONObject properties = from.getJSONObject("properties");
        if (properties != null) {
            properties.forEach((name, value) ->
                message.putUserProperty(name, String.valueOf(value)));
        }
        return message;
    }

    static JSONObject of(SendResult sent) {
        JSONObject result = new JSONObject();
        result.put("status", sent.getSendStatus().name());
        result.put("msgId", sent.getMsgId());
        result.put("offsetMsgId", sent.getOffsetMsgId());
        result.put("offset", sent.getQueueOffset());
        if (sent.getMessageQueue() != null) {
            result.put("broker", sent.getMessageQueue().getBrokerName());
            result.put("queue", sent.getMessageQueue().getQueueId());
        }
        return result;
    }

    static JSONObject of(MessageExt message) {
        JSONObject result = new JSONObject();
        byte[] body = message.getBody();
        result.put("topic", message.getTopic());
        result.put("broker", message.getBrokerName());
        result.put("queue", message.getQueueId());
        result.put("offset", message.getQueueOffset());
        result.put("physical", message.getCommitLogOffset());
        result.put("msgId", message.getMsgId());
        if (message instanceof MessageClientExt) {
            result.put("offsetMsgId", ((MessageClientExt) message).getOffsetMsgId());
        }
        result.put("size", body == null ? 0 : body.length);
        result.put("body", body == null ? null : shown(body));
        result.put("tags", message.getTags());
        result.put("keys", message.getKeys());
        result.put("flag", message.getFlag());
        result.put("sysFlag", message.getSysFlag());
        result.put("properties", message.getProperties());
        result.put("reconsume", message.getReconsumeTimes());
        result.put("bornHost", String.valueOf(message.getBornHost()));
        result.put("storeHost", String.valueOf(message.getStoreHost()));
        result.put("born", message.getBornTimestamp());
        result.put("stored", message.getStoreTimestamp());
        return result;
    }

    private static String shown(byte[] body) {
        return body.length <= SHOWN_BYTES ? new String(body, StandardCharsets.UTF_8) : sha1(body);
    }

    private static String sha1(byte[] body) {
        try {
            return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-1").digest(body));
        } catch (java.security.NoSuchAlgorithmException e) {
            throw new IllegalStateException(e);
        }
    }

    static JSONArray of(MessageQueue queue) {
        return JSONArray.of(queue.getTopic(), queue.getBrokerName(), queue.getQueueId());
    }

    /** Return the queue of a request: its topic, its broker and its number. */
    static MessageQueue queue(JSONObject request) {
        return new MessageQueue(request.getString("topic"), request.getString("broker"),
            request.getIntValue("queue"));
    }

    /** Return a failure as {"error", "code"}; the code is the server's, if it gave one. */
    static JSONObject of(Throwable failure) {
        JSONObject result = new JSONObject();
        result.put("error", failure.toString());
        if (failure.getCause() != null) {
            result.put("cause", failure.getCause().toString());
        }
        try {
            result.put("code", failure.getClass().getMethod("getResponseCode").invoke(failure));
        } catch (ReflectiveOperationException none) {
            return result;
        }
        return result;
    }
}
