package hastore.clients;

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
 * Runs RocketMQ's own clients on request: reads requests {"id", "op", ...} as lines of JSON from
 * stdin, and answers {"id", "result" | "error"} on stdout. Each request runs in its own thread. Ends
 * when stdin ends. The arguments name classes with more operations.
 */
public final class Clients {
    /** The operation of a request. */
    public interface Operation {
        Object run(JSONObject request) throws Exception;
    }

    private final Map<String, Operation> operations = new HashMap<>();
    private final PrintStream out;

    private Clients(PrintStream out) {
        this.out = out;
    }

    public void add(String name, Operation operation) {
        operations.put(name, operation);
    }

    /** Return milliseconds of the clock that Python calls time.monotonic. */
    static double nowMs() {
        return System.nanoTime() / 1e6;
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
        Clients clients = new Clients(answers);
        Producers producers = new Producers();
        producers.addTo(clients);
        new Load(producers).addTo(clients);
        new PushConsumers().addTo(clients);
        new PullConsumers().addTo(clients);
        for (String name : arguments) {
            Class.forName(name).getMethod("addTo", Clients.class).invoke(null, clients);
        }
        ExecutorService threads = Executors.newCachedThreadPool();
        BufferedReader in =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JSONObject request = JSONObject.parseObject(line);
            threads.execute(() -> clients.answer(request));
        }
        Runtime.getRuntime().halt(0);
    }
}
