package interop.five;

import java.io.IOException;
import java.lang.reflect.Field;
import java.net.InetSocketAddress;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.ha.DefaultHAService;

/**
 * RocketMQ's own HA service, but listening on 127.0.0.1, and with the configured master from the
 * start. The original listens on every interface and has no setting for the address. The store finds this class by META-INF/service.
 */
public final class LoopbackHAService extends DefaultHAService {
    @Override
    public void init(DefaultMessageStore store) throws IOException {
        super.init(store);
        String master = store.getMessageStoreConfig().getHaMasterAddress();
        if (master != null) { // version 5 forgets it if it is told before the client exists
            updateHaMasterAddress(master);
        }
        try {
            Class<?> type = this.acceptSocketService.getClass();
            while (!type.getSimpleName().equals("AcceptSocketService")) {
                type = type.getSuperclass();
            }
            Field address = type.getDeclaredField("socketAddressListen");
            address.setAccessible(true);
            int port = store.getMessageStoreConfig().getHaListenPort();
            address.set(this.acceptSocketService, new InetSocketAddress("127.0.0.1", port));
        } catch (ReflectiveOperationException e) {
            throw new IOException(e);
        }
    }
}
