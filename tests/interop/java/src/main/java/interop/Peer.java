package interop;

import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * Runs a project's own classes on request: reads requests {"id", "op", ...} as lines of JSON from
 * stdin, and answers {"id", "result" | "error"} on stdout. Each request runs in its own thread. Ends
 * when stdin ends. The argument names the class that registers the operations of the project.
 */
public final class Peer {
    public interface Operation {
        Object run(JSONObject request) throws Exception;
    }

    private final Map<String, Operation> operations = new HashMap<>();
    private final PrintStream out;

    private Peer(PrintStream out) {
        this.out = out;
    }

    public void add(String name, Operation operation) {
        operations.put(name, operation);
    }

    private void answer(JSONObject request) {
        JSONObject answer = new JSONObject();
        answer.put("id", request.get("id"));
        try {
            Operation operation = operations.get(request.getString("op"));
            if (operation == null) {
                throw new IllegalArgumentException("no such op: " + request.getString("op"));
            }
            answer.put("result", operation.run(request));
        } catch (Throwable failure) {
            failure.printStackTrace();
            answer.put("error", failure.toString());
        }
        synchronized (out) {
            out.println(answer.toJSONString());
            out.flush();
        }
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err); // other output must not mix with the answers
        Peer peer = new Peer(answers);
        Class.forName(arguments[0]).getMethod("addTo", Peer.class).invoke(null, peer);
        ExecutorService threads = Executors.newCachedThreadPool();
        BufferedReader in =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JSONObject request = JSONObject.parseObject(line);
            threads.execute(() -> peer.answer(request));
        }
        Runtime.getRuntime().halt(0);
    }
}
