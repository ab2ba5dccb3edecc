package interop;

import java.security.MessageDigest;
import java.util.HexFormat;
import org.apache.rocketmq.common.message.MessageExt;

/** Formats a message as a line: topic, queue, queue offset, offset, SHA-1 of the body, keys, tags. */
public final class Lines {
    private Lines() {
    }

    public static String of(MessageExt message) {
        return String.join("\t", message.getTopic(), String.valueOf(message.getQueueId()),
            String.valueOf(message.getQueueOffset()), String.valueOf(message.getCommitLogOffset()),
            sha1(message.getBody()), text(message.getKeys()), text(message.getTags())) + "\n";
    }

    public static String sha1(byte[] body) {
        try {
            byte[] bytes = body == null ? new byte[0] : body;
            return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-1").digest(bytes));
        } catch (java.security.NoSuchAlgorithmException e) {
            throw new IllegalStateException(e);
        }
    }

    private static String text(String value) {
        return value == null ? "" : value;
    }
}
