package bench;

import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

/**
 * Runs RocketMQ's own classes on request: reads requests {"op", ...} as lines of JSON from stdin,
 * and answers each with {"result" | "error"} on stdout, one after the other. Ends when stdin ends.
 */
public final class Bench {
    /** The operation of a request. */
    interface Operation {
        Object run(JSONObject request) throws Exception;
    }

    private final Map<String, Operation> operations = new HashMap<>();

    void add(String name, Operation operation) {
        operations.put(name, operation);
    }

    private JSONObject answer(JSONObject request) {
        JSONObject answer = new JSONObject();
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
        return answer;
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err); // RocketMQ's own output must not mix with the answers
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, "500");
        Bench bench = new Bench();
        new Servers().addTo(bench);
        new Stores().addTo(bench);
        new Load().addTo(bench);
        new Reading().addTo(bench);
        new Ledgers().addTo(bench);
        BufferedReader in =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            answers.println(bench.answer(JSONObject.parseObject(line)).toJSONString());
            answers.flush();
        }
        Runtime.getRuntime().halt(0);
    }
}
