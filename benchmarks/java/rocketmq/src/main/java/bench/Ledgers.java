package bench;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import io.openmessaging.storage.dledger.DLedgerConfig;
import io.openmessaging.storage.dledger.DLedgerServer;
import io.openmessaging.storage.dledger.client.DLedgerClient;
import io.openmessaging.storage.dledger.protocol.AppendEntryRequest;
import io.openmessaging.storage.dledger.protocol.AppendEntryResponse;
import io.openmessaging.storage.dledger.store.DLedgerStore;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Map;
import java.util.Properties;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;

/** A DLedger server, and DLedger's own client under load. */
final class Ledgers {
    private static final int SUCCESS = 200;
    private static final int FILLING = 1_000; // appends that wait while a log is filled

    private DLedgerServer server;
    private DLedgerClient client;
    private byte[] body;

    void addTo(Bench bench) {
        bench.add("ledger.open", this::open);
        bench.add("ledger.close", this::close);
        bench.add("ledger.status", this::status);
        bench.add("ledger.fill", this::fill);
        bench.add("ledger.wait", this::await);
        bench.add("ledger.client", this::startClient);
        bench.add("ledger.blocking", this::blocking);
        bench.add("ledger.threads", this::threads);
        bench.add("ledger.until_acknowledged", this::untilAcknowledged);
    }

    /** Start a server with DLedger's defaults, `config` aside. */
    private Object open(JSONObject request) {
        Properties properties = new Properties();
        for (Map.Entry<String, Object> one : request.getJSONObject("config").entrySet()) {
            properties.setProperty(one.getKey(), String.valueOf(one.getValue()));
        }
        DLedgerConfig config = new DLedgerConfig();
        MixAll.properties2Object(properties, config);
        NettyServerConfig network = new NettyServerConfig();
        network.setBindAddress("127.0.0.1");
        server = new DLedgerServer(config, network);
        server.startup();
        return true;
    }

    private Object close(JSONObject request) {
        server.shutdown();
        server = null;
        return true;
    }

    private Object status(JSONObject request) {
        DLedgerStore store = server.getdLedgerStore();
        return Map.of(
            "role", server.getMemberState().getRole().name(),
            "term", server.getMemberState().currTerm(),
            "leader", String.valueOf(server.getMemberState().getLeaderId()),
            "end", store.getLedgerEndIndex(),
            "end_term", store.getLedgerEndTerm(),
            "committed", store.getCommittedIndex());
    }

    /** Append `count` bodies of `size` bytes on the leader itself; `seed` chooses their byte. */
    private Object fill(JSONObject request) throws Exception {
        byte[] bytes = new byte[request.getIntValue("size")];
        Arrays.fill(bytes, request.getByteValue("seed"));
        ArrayDeque<CompletableFuture<AppendEntryResponse>> waiting = new ArrayDeque<>();
        long began = System.nanoTime();
        for (int left = request.getIntValue("count"); left > 0 || !waiting.isEmpty(); ) {
            if (left > 0 && waiting.size() < FILLING) {
                AppendEntryRequest append = new AppendEntryRequest();
                append.setGroup(server.getMemberState().getGroup());
                append.setRemoteId(server.getMemberState().getSelfId());
                append.setBody(bytes);
                waiting.add(server.handleAppend(append));
                left--;
            } else {
                check(waiting.remove().get(60, TimeUnit.SECONDS));
            }
        }
        return (System.nanoTime() - began) / 1e9;
    }

    /**
     * Wait until the log has an end index, or another one than `leave`; return the seconds since the
     * server followed a leader.
     */
    private Object await(JSONObject request) throws Exception {
        DLedgerStore store = server.getdLedgerStore();
        Long end = request.getLong("end");
        Long leave = request.getLong("leave");
        while (!server.getMemberState().isFollower()) {
            Thread.sleep(1);
        }
        long began = System.nanoTime();
        while (end != null && store.getLedgerEndIndex() != end
                || leave != null && store.getLedgerEndIndex() == leave) {
            if (System.nanoTime() - began > request.getLongValue("limit_s") * 1_000_000_000L) {
                throw new IllegalStateException("the log's end is " + store.getLedgerEndIndex());
            }
            Thread.sleep(1);
        }
        return (System.nanoTime() - began) / 1e9;
    }

    private Object startClient(JSONObject request) {
        body = new byte[request.getIntValue("size")];
        new Random(1).nextBytes(body);
        client = new DLedgerClient(request.getString("group"), request.getString("peers"));
        client.startup();
        return true;
    }

    private static void check(AppendEntryResponse done) {
        if (done.getCode() != SUCCESS) {
            throw new IllegalStateException("an append ended with code " + done.getCode());
        }
    }

    /** Append one entry after the other; return the duration of each, in ms. */
    private Object blocking(JSONObject request) {
        JSONArray took = new JSONArray();
        for (int i = request.getIntValue("count"); i > 0; i--) {
            long began = System.nanoTime();
            check(client.append(body));
            took.add((System.nanoTime() - began) / 1e6);
        }
        return took;
    }

    private Object threads(JSONObject request) throws Exception {
        return Load.race(request.getIntValue("threads"), request.getIntValue("count"),
            number -> check(client.append(body)));
    }

    /** Append until one entry is acknowledged; return the number of attempts. */
    private Object untilAcknowledged(JSONObject request) throws Exception {
        long deadline = System.nanoTime() + request.getLongValue("limit_s") * 1_000_000_000L;
        for (int attempt = 1; System.nanoTime() < deadline; attempt++) {
            if (client.append(body).getCode() == SUCCESS) {
                return attempt;
            }
            Thread.sleep(5); // no leader, or it does not answer
        }
        throw new IllegalStateException("nothing was acknowledged in time");
    }
}
