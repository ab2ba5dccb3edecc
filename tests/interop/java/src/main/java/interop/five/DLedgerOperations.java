package interop.five;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import interop.Peer;
import io.openmessaging.storage.dledger.AppendFuture;
import io.openmessaging.storage.dledger.DLedgerConfig;
import io.openmessaging.storage.dledger.DLedgerServer;
import io.openmessaging.storage.dledger.MemberState;
import io.openmessaging.storage.dledger.entry.DLedgerEntry;
import io.openmessaging.storage.dledger.protocol.AppendEntryRequest;
import io.openmessaging.storage.dledger.protocol.AppendEntryResponse;
import io.openmessaging.storage.dledger.store.DLedgerStore;
import io.openmessaging.storage.dledger.store.file.DLedgerMmapFileStore;
import java.io.Writer;
import java.net.BindException;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;

/** Real DLedger servers, any number in this process, each under its id. */
final class DLedgerOperations {
    private final Map<String, DLedgerServer> servers = new ConcurrentHashMap<>();

    void addTo(Peer peer) {
        peer.add("dledger.start", this::start);
        peer.add("dledger.stop", this::stop);
        peer.add("dledger.stop_all", this::stopAll);
        peer.add("dledger.status", this::status);
        peer.add("dledger.append", this::append);
        peer.add("dledger.dump", this::dump);
        peer.add("dledger.cut", this::cut);
    }

    /**
     * Start a server; `config` has DLedgerConfig's own keys. With `records` its leader fills in the
     * physical offset of the records that are the bodies, as RocketMQ's does.
     */
    private Object start(JSONObject request) throws Exception {
        Properties properties = new Properties();
        for (Map.Entry<String, Object> one : request.getJSONObject("config").entrySet()) {
            properties.setProperty(one.getKey(), String.valueOf(one.getValue()));
        }
        DLedgerConfig config = new DLedgerConfig();
        MixAll.properties2Object(properties, config);
        NettyServerConfig network = new NettyServerConfig();
        network.setBindAddress("127.0.0.1");
        network.setServerWorkerThreads(2);
        network.setServerSelectorThreads(1);
        DLedgerServer server = new DLedgerServer(config, network);
        if (request.getBooleanValue("records")) {
            DLedgerMmapFileStore store = (DLedgerMmapFileStore) server.getdLedgerStore();
            store.addAppendHook((entry, buffer, bodyOffset) -> {
                if (entry.getBody().length >= MessageDecoder.PHY_POS_POSITION + Long.BYTES) {
                    buffer.putLong(
                        buffer.position() + bodyOffset + MessageDecoder.PHY_POS_POSITION,
                        entry.getPos() + bodyOffset);
                }
            });
        }
        server.startup();
        servers.put(config.getSelfId(), server);
        return true;
    }

    private DLedgerServer server(JSONObject request) {
        DLedgerServer server = servers.get(request.getString("server"));
        if (server == null) {
            throw new IllegalArgumentException("no such server: " + request.getString("server"));
        }
        return server;
    }

    private Object stop(JSONObject request) throws Exception {
        stop(server(request));
        servers.remove(request.getString("server"));
        return true;
    }

    private Object stopAll(JSONObject request) {
        servers.values().parallelStream().forEach(DLedgerServer::shutdown);
        servers.clear();
        return true;
    }

    /** Shut down and wait until the port is free: Netty closes it later. */
    private static void stop(DLedgerServer server) throws Exception {
        server.shutdown();
        String port = server.getMemberState().getSelfAddr().split(":")[1];
        for (int attempt = 0; ; attempt++) {
            try (ServerSocket free = new ServerSocket()) {
                free.setReuseAddress(true);
                free.bind(new InetSocketAddress("127.0.0.1", Integer.parseInt(port)));
                return;
            } catch (BindException taken) {
                if (attempt == 3_000) {
                    throw taken;
                }
                Thread.sleep(10);
            }
        }
    }

    private Object status(JSONObject request) {
        MemberState member = server(request).getMemberState();
        DLedgerStore store = server(request).getdLedgerStore();
        JSONObject status = new JSONObject();
        status.put("role", member.getRole().name());
        status.put("term", member.currTerm());
        status.put("vote", member.currVoteFor());
        status.put("leader", member.getLeaderId());
        status.put("begin", store.getLedgerBeginIndex());
        status.put("end", store.getLedgerEndIndex());
        status.put("end_term", store.getLedgerEndTerm());
        status.put("committed", store.getCommittedIndex());
        if (store instanceof DLedgerMmapFileStore) {
            status.put("written", ((DLedgerMmapFileStore) store).getWritePos());
            status.put("flushed", ((DLedgerMmapFileStore) store).getFlushPos());
        }
        return status;
    }

    private static AppendEntryRequest request(DLedgerServer server, byte[] body) {
        AppendEntryRequest append = new AppendEntryRequest();
        append.setGroup(server.getMemberState().getGroup());
        append.setRemoteId(server.getMemberState().getSelfId());
        append.setBody(body);
        return append;
    }

    private static List<byte[]> bodies(JSONObject request) {
        List<byte[]> bodies = new ArrayList<>();
        JSONArray given = request.getJSONArray("bodies");
        for (int i = 0; given != null && i < given.size(); i++) {
            bodies.add(HexFormat.of().parseHex(given.getString(i)));
        }
        Random random = new Random(request.getLongValue("seed"));
        for (int i = 0; i < request.getIntValue("count"); i++) {
            byte[] body = new byte[random.nextInt(request.getIntValue("most") + 1)];
            random.nextBytes(body);
            bodies.add(body);
        }
        return bodies;
    }

    /** Append all at once; return [code, index, pos, term] of each when all are answered. */
    private Object append(JSONObject request) throws Exception {
        DLedgerServer server = server(request);
        List<CompletableFuture<AppendEntryResponse>> waiting = new ArrayList<>();
        List<Long> places = new ArrayList<>();
        for (byte[] body : bodies(request)) {
            CompletableFuture<AppendEntryResponse> future =
                server.handleAppend(request(server, body));
            waiting.add(future);
            places.add(((AppendFuture<?>) future).getPos());
        }
        JSONArray results = new JSONArray();
        for (int i = 0; i < waiting.size(); i++) {
            AppendEntryResponse done = waiting.get(i).get(60, TimeUnit.SECONDS);
            results.add(List.of(done.getCode(), done.getIndex(), places.get(i), done.getTerm()));
        }
        return results;
    }

    /** Write a line for each entry: index, term, pos, size, magic, SHA-256 of the body. */
    private Object dump(JSONObject request) throws Exception {
        DLedgerStore store = server(request).getdLedgerStore();
        long count = 0;
        try (Writer out = Files.newBufferedWriter(Path.of(request.getString("file")))) {
            for (long i = store.getLedgerBeginIndex(); i >= 0 && i <= store.getLedgerEndIndex(); i++) {
                DLedgerEntry entry = store.get(i);
                byte[] digest = MessageDigest.getInstance("SHA-256").digest(entry.getBody());
                out.write(String.format("%d %d %d %d %d %s\n", entry.getIndex(), entry.getTerm(),
                    entry.getPos(), entry.getSize(), entry.getMagic(),
                    HexFormat.of().formatHex(digest)));
                count++;
            }
        }
        return count;
    }

    /**
     * Append one entry after the other until one is acknowledged that no server of this process has
     * synced; then take their flushed positions. What lies behind them is lost at a power cut.
     */
    private Object cut(JSONObject request) throws Exception {
        DLedgerServer leader = server(request);
        byte[] body = new byte[request.getIntValue("size")];
        for (int attempt = 1; attempt <= request.getIntValue("attempts"); attempt++) {
            AppendEntryResponse done =
                leader.handleAppend(request(leader, body)).get(60, TimeUnit.SECONDS);
            JSONObject flushed = new JSONObject();
            boolean nowhere = done.getCode() == 200;
            for (Map.Entry<String, DLedgerServer> one : servers.entrySet()) {
                DLedgerMmapFileStore store =
                    (DLedgerMmapFileStore) one.getValue().getdLedgerStore();
                long position = store.getFlushPos();
                flushed.put(one.getKey(), position);
                nowhere &= position <= done.getPos();
            }
            if (nowhere) {
                JSONObject found = new JSONObject();
                found.put("attempt", attempt);
                found.put("index", done.getIndex());
                found.put("pos", done.getPos());
                found.put("flushed", flushed);
                return found;
            }
        }
        throw new IllegalStateException("each acknowledged entry was synced somewhere");
    }
}
