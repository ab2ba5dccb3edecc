package interop;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.io.Writer;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.MessageStore;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** A bare DefaultMessageStore; `status`, `dump` and `query` also work for a broker's store. */
public abstract class StoreOperations {
    /** The open store of this process: a bare one, or its broker's. */
    public static volatile MessageStore current;

    private DefaultMessageStore store;

    protected abstract DefaultMessageStore make(MessageStoreConfig config, BrokerConfig broker)
        throws Exception;

    /** Create this version's MessageExtBrokerInner, fill it, and store it. */
    protected abstract PutMessageResult put(DefaultMessageStore store, JSONObject message)
        throws Exception;

    /** Return the queues of the store, by topic. */
    protected abstract Map<String, Set<Integer>> queues(MessageStore store);

    /** Add the fields that only this version's store has. */
    protected abstract void addStatus(MessageStore store, JSONObject status);

    protected void addOperations(Peer peer) {
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, "500");
        peer.add("store.open", this::open);
        peer.add("store.close", this::close);
        peer.add("store.put", this::put);
        peer.add("store.status", this::status);
        peer.add("store.dump", this::dump);
        peer.add("store.query", this::query);
        peer.add("store.look", this::look);
    }

    private Object open(JSONObject request) throws Exception {
        String master = request.getString("master");
        MessageStoreConfig config = Settings.store(request);
        config.setHaMasterAddress(master);
        store = make(config, Settings.broker(request));
        if (!store.load()) {
            throw new IllegalStateException("RocketMQ refuses to load this store");
        }
        if (master != null) { // before the start: a client without an address waits for 5 s
            store.updateHaMasterAddress(master);
        }
        store.start();
        current = store;
        return status(request);
    }

    private Object close(JSONObject request) {
        store.shutdown();
        current = store = null;
        return true;
    }

    private Object put(JSONObject request) throws Exception {
        JSONArray results = new JSONArray();
        JSONArray messages = request.getJSONArray("messages");
        for (int i = 0; i < messages.size(); i++) {
            PutMessageResult done = put(store, messages.getJSONObject(i));
            JSONArray one = new JSONArray();
            one.add(done.getPutMessageStatus().name());
            boolean stored = done.getAppendMessageResult() != null;
            one.add(stored ? done.getAppendMessageResult().getWroteOffset() : null);
            one.add(stored ? done.getAppendMessageResult().getMsgId() : null);
            one.add(stored ? done.getAppendMessageResult().getLogicsOffset() : null);
            results.add(one);
        }
        return results;
    }

    /** Set all fields except those of MessageExtBrokerInner, whose package differs by version. */
    protected static void fill(MessageExt message, JSONObject from) throws Exception {
        message.setTopic(from.getString("topic"));
        message.setQueueId(from.getIntValue("queue"));
        if (from.containsKey("size")) { // a reproducible body
            byte[] body = new byte[from.getIntValue("size")];
            new Random(from.getLongValue("seed")).nextBytes(body);
            message.setBody(body);
        } else {
            message.setBody(HexFormat.of().parseHex(from.getString("body")));
        }
        message.setFlag(from.getIntValue("flag"));
        message.setSysFlag(from.getIntValue("sysFlag"));
        message.setBornTimestamp(System.currentTimeMillis());
        message.setBornHost(host(from.getString("bornHost")));
        message.setStoreHost(host(from.getString("storeHost")));
        message.setReconsumeTimes(from.getIntValue("reconsumeTimes"));
        JSONObject properties = from.getJSONObject("properties");
        if (properties != null) {
            for (Map.Entry<String, Object> one : properties.entrySet()) {
                MessageAccessor.putProperty(message, one.getKey(), String.valueOf(one.getValue()));
            }
        }
        if (((InetSocketAddress) message.getBornHost()).getAddress().getAddress().length == 16) {
            message.setBornHostV6Flag();
        }
        if (((InetSocketAddress) message.getStoreHost()).getAddress().getAddress().length == 16) {
            message.setStoreHostAddressV6Flag();
        }
    }

    protected static long tagsCode(MessageExt message) {
        String tags = message.getTags();
        return tags == null ? 0 : tags.hashCode();
    }

    protected static String propertiesOf(MessageExt message) {
        return MessageDecoder.messageProperties2String(message.getProperties());
    }

    private static InetSocketAddress host(String text) throws Exception {
        String address = text == null ? "127.0.0.1" : text;
        return new InetSocketAddress(InetAddress.getByName(address), 10911);
    }

    private Object status(JSONObject request) {
        MessageStore store = current;
        JSONObject status = new JSONObject();
        status.put("min", store.getMinPhyOffset());
        status.put("max", store.getMaxPhyOffset());
        status.put("behind", store.dispatchBehindBytes());
        status.put("dispatched", store.dispatchBehindBytes() == 0);
        addStatus(store, status);
        return status;
    }

    /**
     * Read all queues with getMessage, like a pull, and write a line for each message.
     *
     * The store fills its queues in a thread of its own, behind the puts: wait for that first.
     */
    private Object dump(JSONObject request) throws Exception {
        MessageStore store = current;
        for (int looks = 0; store.dispatchBehindBytes() > 0 && looks < 6_000; looks++) {
            Thread.sleep(10);
        }
        long count = 0;
        try (Writer out = Files.newBufferedWriter(Path.of(request.getString("file")))) {
            for (Map.Entry<String, Set<Integer>> topic : queues(store).entrySet()) {
                for (Integer queue : topic.getValue()) {
                    count += dumpQueue(store, topic.getKey(), queue, out);
                }
            }
        }
        return count;
    }

    private static long dumpQueue(MessageStore store, String topic, int queue, Writer out)
        throws Exception {
        long next = store.getMinOffsetInQueue(topic, queue);
        long count = 0;
        while (next < store.getMaxOffsetInQueue(topic, queue)) {
            GetMessageResult got = store.getMessage("dump", topic, queue, next, 64, null);
            try {
                if (got.getStatus() != GetMessageStatus.FOUND) {
                    throw new IllegalStateException(
                        topic + " " + queue + " at " + next + ": " + got.getStatus());
                }
                for (ByteBuffer buffer : got.getMessageBufferList()) {
                    out.write(Lines.of(MessageDecoder.decode(buffer, true, false)));
                    count++;
                }
                next = got.getNextBeginOffset();
            } finally {
                got.release();
            }
        }
        return count;
    }

    private Object query(JSONObject request) throws Exception {
        QueryMessageResult found = current.queryMessage(request.getString("topic"),
            request.getString("key"), 64, 0, Long.MAX_VALUE);
        try {
            List<Long> offsets = new ArrayList<>();
            for (ByteBuffer buffer : found.getMessageBufferList()) {
                MessageExt message = MessageDecoder.decode(buffer, false, false);
                offsets.add(message.getCommitLogOffset());
            }
            return offsets;
        } finally {
            found.release();
        }
    }

    private Object look(JSONObject request) {
        MessageExt message = current.lookMessageByOffset(request.getLongValue("offset"));
        return message == null ? null : Lines.of(message).strip();
    }
}
