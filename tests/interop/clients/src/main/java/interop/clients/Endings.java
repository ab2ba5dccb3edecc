package interop.clients;

import java.lang.management.LockInfo;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadInfo;
import java.lang.management.ThreadMXBean;
import java.util.Set;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/**
 * Lets clients end without RocketMQ's wait of up to 3 s: their last thread sleeps so long before it
 * sees that it shall stop. An interrupt, as `ServiceThread.shutdown(true)` sends, wakes it.
 */
final class Endings implements Runnable {
    private static final String LAST = "NettyEventExecutor";
    private static final int LOOK_MS = 20;
    private final ThreadMXBean threads = ManagementFactory.getThreadMXBean();

    private Endings() {
    }

    static void watch() {
        Thread thread = new Thread(new Endings(), "endings");
        thread.setDaemon(true);
        thread.start();
    }

    @Override
    public void run() {
        while (true) {
            Set<Integer> joined = joined();
            if (!joined.isEmpty()) {
                all().filter(one -> one.getName().equals(LAST))
                    .filter(one -> joined.contains(System.identityHashCode(one)))
                    .forEach(Thread::interrupt);
            }
            try {
                Thread.sleep(LOOK_MS);
            } catch (InterruptedException end) {
                return;
            }
        }
    }

    /** Return the identities of the threads for whose end another waits. */
    private Set<Integer> joined() {
        return Stream.of(threads.getThreadInfo(threads.getAllThreadIds(), 0))
            .filter(one -> one != null && one.getLockInfo() != null)
            .map(ThreadInfo::getLockInfo)
            .filter(one -> !one.getClassName().startsWith("java.util."))
            .map(LockInfo::getIdentityHashCode)
            .collect(Collectors.toSet());
    }

    private static Stream<Thread> all() {
        ThreadGroup group = Thread.currentThread().getThreadGroup();
        while (group.getParent() != null) {
            group = group.getParent();
        }
        Thread[] found = new Thread[group.activeCount() + 64];
        return Stream.of(found).limit(group.enumerate(found));
    }
}
