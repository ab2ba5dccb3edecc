package hastore.clients;

import com.alibaba.fastjson2.JSONArray;
import com.alibaba.fastjson2.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Numbered messages in the background, sent while servers die: `streams` threads, each of which sends
 * its numbers in order, one every `every_ms`. The body is "STREAM:NUMBER", a blank and filling.
 *
 * <p>Without `ordered` each number is sent once by `send(message)`, with the client's own retries.
 * With it, each stream has a queue number; it sends a number again until it is acknowledged, to that
 * queue under the next broker name, as an application does that must keep an order.
 */
final class Load {
    private final Producers producers;
    private final Map<String, Run> runs = new ConcurrentHashMap<>();

    Load(Producers producers) {
        this.producers = producers;
    }

    void addTo(Clients clients) {
        clients.add("load.start", this::start);
        clients.add("load.count", request -> of(request).acknowledged());
        clients.add("load.first", request -> of(request).first(request.getDoubleValue("since_ms")));
        clients.add("load.hold", request -> of(request).hold(request.getBooleanValue("held")));
        clients.add("load.stop", request -> of(request).stop());
    }

    private Run of(JSONObject request) {
        Run run = runs.get(request.getString("load"));
        if (run == null) {
            throw new IllegalArgumentException("no load " + request.getString("load"));
        }
        return run;
    }

    private Object start(JSONObject request) {
        Run run = new Run(producers.of(request), request);
        runs.put(request.getString("load"), run);
        run.start();
        return true;
    }

    private static final class Run {
        private final DefaultMQProducer producer;
        private final String topic;
        private final double everyMs;
        private final boolean ordered;
        private final byte[] filling;
        private final long count;
        private final List<Stream> streams = new ArrayList<>();
        private volatile boolean stopping;
        private volatile boolean held;

        Run(DefaultMQProducer producer, JSONObject request) {
            this.producer = producer;
            this.topic = request.getString("topic");
            this.everyMs = request.getDoubleValue("every_ms");
            this.ordered = request.getBooleanValue("ordered");
            this.filling = new byte[Math.max(0, request.getIntValue("size", 64) - 24)];
            java.util.Arrays.fill(filling, (byte) '.');
            this.count = request.getLongValue("count", Long.MAX_VALUE);
            for (int i = 0; i < request.getIntValue("streams", 1); i++) {
                streams.add(new Stream(i));
            }
        }

        void start() {
            streams.forEach(Thread::start);
        }

        int acknowledged() {
            return streams.stream().mapToInt(Stream::acknowledged).sum();
        }

        /** Return when the first send that began after a time was acknowledged, or nothing. */
        Object first(double sinceMs) {
            double first = streams.stream().mapToDouble(stream -> stream.first(sinceMs)).min()
                .orElse(Double.MAX_VALUE);
            return first == Double.MAX_VALUE ? null : first;
        }

        /** Stop new sends, or let them go on. */
        Object hold(boolean wanted) {
            held = wanted;
            return true;
        }

        /** End all streams; return what each acknowledged, what failed and what was stored late. */
        Object stop() throws InterruptedException {
            stopping = true;
            JSONArray all = new JSONArray();
            for (Stream stream : streams) {
                stream.join();
                all.add(stream.result());
            }
            return all;
        }

        private final class Stream extends Thread {
            private final int number;
            private final JSONArray acknowledged = new JSONArray();
            private final JSONArray failed = new JSONArray();
            private final Map<String, Integer> statuses = new HashMap<>();

            Stream(int number) {
                super("load-" + number);
                this.number = number;
            }

            synchronized int acknowledged() {
                return acknowledged.size();
            }

            /** Return the first acknowledgement of a send that began after a time. */
            synchronized double first(double sinceMs) {
                double first = Double.MAX_VALUE;
                for (int i = acknowledged.size() - 1; i >= 0; i--) {
                    JSONArray one = acknowledged.getJSONArray(i);
                    if (one.getDouble(1) - one.getDouble(2) < sinceMs) {
                        break; // the sends of a stream follow one another
                    }
                    first = one.getDouble(1);
                }
                return first;
            }

            synchronized JSONObject result() {
                return JSONObject.of("stream", number, "acknowledged", acknowledged, "failed", failed)
                    .fluentPut("statuses", statuses);
            }

            @Override
            public void run() {
                double next = Clients.nowMs();
                for (long at = 0; at < count && !stopping; at++) {
                    while (held && !stopping) {
                        LockSupport.parkNanos(5_000_000);
                    }
                    sendNumber(at);
                    next += everyMs;
                    double left = next - Clients.nowMs();
                    if (left > 0) {
                        LockSupport.parkNanos((long) (left * 1e6));
                    } else {
                        next = Clients.nowMs(); // what was late is not made up for by a burst
                    }
                }
            }

            private Message message(long at) {
                byte[] head = (number + ":" + at + " ").getBytes(StandardCharsets.UTF_8);
                byte[] body = new byte[head.length + filling.length];
                System.arraycopy(head, 0, body, 0, head.length);
                System.arraycopy(filling, 0, body, head.length, filling.length);
                Message message = new Message(topic, "", number + "-" + at, body);
                message.putUserProperty("stream", String.valueOf(number));
                return message;
            }

            private void sendNumber(long at) {
                for (int attempt = 0;; attempt++) {
                    double began = Clients.nowMs();
                    try {
                        SendResult sent = ordered ? sendOrdered(at, attempt)
                            : producer.send(message(at));
                        settle(at, began, sent);
                        if (!ordered || sent.getSendStatus() == SendStatus.SEND_OK) {
                            return;
                        }
                    } catch (InterruptedException end) {
                        return;
                    } catch (Exception failure) {
                        note(at, began, failure);
                        if (!ordered) {
                            return;
                        }
                    }
                    if (stopping && attempt > 20) {
                        return; // its servers are gone for good
                    }
                    LockSupport.parkNanos(20_000_000);
                }
            }

            private SendResult sendOrdered(long at, int attempt) throws Exception {
                return producer.send(message(at), (queues, message, key) -> {
                    List<MessageQueue> mine = new ArrayList<>();
                    int numbers = 1 + queues.stream().mapToInt(MessageQueue::getQueueId).max()
                        .orElse(0);
                    for (MessageQueue queue : queues) {
                        if (queue.getQueueId() == number % numbers) {
                            mine.add(queue);
                        }
                    }
                    return mine.get(attempt % mine.size());
                }, number);
            }

            private synchronized void settle(long at, double began, SendResult sent) {
                double now = Clients.nowMs();
                statuses.merge(sent.getSendStatus().name(), 1, Integer::sum);
                if (sent.getSendStatus() == SendStatus.SEND_OK) {
                    acknowledged.add(JSONArray.of(at, now, now - began));
                }
            }

            private synchronized void note(long at, double began, Exception failure) {
                failed.add(JSONArray.of(at, Clients.nowMs(), Clients.nowMs() - began,
                    failure.toString()));
            }
        }
    }
}
