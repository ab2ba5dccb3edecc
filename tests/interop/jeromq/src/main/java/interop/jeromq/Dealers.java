package interop.jeromq;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import interop.Peer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import org.zeromq.SocketType;
import org.zeromq.ZContext;
import org.zeromq.ZMQ;

/**
 * Named DEALER sockets of JeroMQ, in named contexts. A message is a list of frames, a frame is a
 * string of hexadecimal digits. A lock allows one request at a time, because each request runs in
 * its own thread and a socket may be used by one thread at a time.
 */
public final class Dealers {
    /** After this time JeroMQ reconnects (by default 30 s); it sometimes loses a handshake. */
    private static final int HANDSHAKE_MS = 3_000;

    private final Map<String, ZContext> contexts = new HashMap<>();
    private final Map<String, ZMQ.Socket> sockets = new HashMap<>();

    public static void addTo(Peer peer) {
        Dealers dealers = new Dealers();
        peer.add("connect", dealers::connect);
        peer.add("ask", dealers::ask);
        peer.add("close", dealers::close);
    }

    /** Takes {"context", "socket", "address", "heartbeat_ms": 0 for none}; replaces a socket. */
    private synchronized Object connect(JSONObject request) {
        String name = request.getString("context");
        ZContext context = contexts.computeIfAbsent(name, ignored -> new ZContext());
        ZMQ.Socket former = sockets.remove(request.getString("socket"));
        if (former != null) {
            context.destroySocket(former);
        }
        ZMQ.Socket socket = context.createSocket(SocketType.DEALER);
        socket.setLinger(0);
        socket.setHandshakeIvl(HANDSHAKE_MS);
        socket.setReceiveTimeOut(request.getIntValue("timeout_ms"));
        int heartbeatMs = request.getIntValue("heartbeat_ms");
        if (heartbeatMs > 0) {
            socket.setHeartbeatIvl(heartbeatMs);
            socket.setHeartbeatTimeout(request.getIntValue("timeout_ms"));
        }
        sockets.put(request.getString("socket"), socket);
        return socket.connect(request.getString("address"));
    }

    /** Takes {"socket", "messages"}: send all, receive as many; return those before a timeout. */
    private synchronized Object ask(JSONObject request) {
        ZMQ.Socket socket = sockets.get(request.getString("socket"));
        JSONArray messages = request.getJSONArray("messages");
        for (int i = 0; i < messages.size(); i++) {
            JSONArray frames = messages.getJSONArray(i);
            for (int k = 0; k < frames.size(); k++) {
                byte[] frame = HexFormat.of().parseHex(frames.getString(k));
                if (!socket.send(frame, k + 1 < frames.size() ? ZMQ.SNDMORE : 0)) {
                    throw new IllegalStateException("not sent: errno " + socket.errno());
                }
            }
        }
        List<List<String>> replies = new ArrayList<>();
        while (replies.size() < messages.size()) {
            byte[] frame = socket.recv();
            if (frame == null) {
                break;
            }
            List<String> frames = new ArrayList<>();
            frames.add(HexFormat.of().formatHex(frame));
            while (socket.hasReceiveMore()) {
                frames.add(HexFormat.of().formatHex(socket.recv()));
            }
            replies.add(frames);
        }
        return replies;
    }

    /** Takes {"context"}: close it with all its sockets. */
    private synchronized Object close(JSONObject request) {
        contexts.remove(request.getString("context")).close();
        return true;
    }
}
