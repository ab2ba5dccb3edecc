package interop.clients;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import hastore.clients.Clients;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.List;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** RocketMQ's mqadmin: one command after the other, with what it prints. */
public final class AdminTool {
    private AdminTool() {
    }

    public static void addTo(Clients clients) {
        clients.add("mqadmin", AdminTool::run);
        clients.add("property", AdminTool::setProperty);
        Endings.watch();
    }

    /** Set a system property: a producer of version 4 is told only so how to compress. */
    private static Object setProperty(JSONObject request) {
        System.setProperty(request.getString("name"), request.getString("value"));
        return null;
    }

    /** Forget the commands of earlier runs: that of sendMessage keeps a producer that has ended. */
    private static void forget() throws IllegalAccessException {
        for (Field field : MQAdminStartup.class.getDeclaredFields()) {
            if (List.class.isAssignableFrom(field.getType())) {
                field.setAccessible(true);
                ((List<?>) field.get(null)).clear();
            }
        }
    }

    /** Run a command with `arguments`; return what it printed to both streams. */
    private static synchronized Object run(JSONObject request) throws IllegalAccessException {
        forget();
        JSONArray given = request.getJSONArray("arguments");
        String[] arguments = given.toArray(new String[0]);
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream out = System.out;
        PrintStream err = System.err;
        PrintStream both = new PrintStream(printed, true, StandardCharsets.UTF_8);
        System.setOut(both);
        System.setErr(both);
        try {
            MQAdminStartup.main0(arguments, null);
        } finally {
            System.setOut(out);
            System.setErr(err);
        }
        return printed.toString(StandardCharsets.UTF_8);
    }
}
