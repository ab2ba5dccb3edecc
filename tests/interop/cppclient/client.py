"""RocketMQ's C++ client by its Python wheel: send, receive, and print what was seen as JSON.

tests/interop/test_other_clients.py runs it in an environment of its own, where the wheel is.
"""

import json
import os
import sys
import threading
import time

from rocketmq.client import Message, Producer, PushConsumer
from rocketmq.exceptions import ProducerSendSyncFailed

servers, topic, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
during = len(sys.argv) > 4  # the consumer reads while the master is killed


def sign(client):
    """Let a client sign its requests, if it was given an identity."""
    if "ACCESS_KEY" in os.environ:
        given = os.environ["ACCESS_KEY"], os.environ["SECRET_KEY"]
        client.set_session_credentials(*given, "")


producer = Producer("cpp-producers")
producer.set_namesrv_addr(servers)
sign(producer)
producer.start()
status = []


def send(message):
    """Send; this client fails at once while its heartbeat still connects, or the master moves."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return producer.send_sync(message)
        except ProducerSendSyncFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


lock = threading.Lock()
received = {}
rich = []


def take(message):
    with lock:
        body = message.body.decode()
        received[body] = received.get(body, 0) + 1
        if body == "cpp 1":
            rich[:] = [message.tags.decode(), message.keys.decode()]


consumer = PushConsumer("cpp-consumers")
consumer.set_namesrv_addr(servers)
sign(consumer)
consumer.subscribe(topic, take)


def wait(least):
    deadline = time.monotonic() + 150
    while len(received) < least and time.monotonic() < deadline:
        time.sleep(0.05)


for number in range(count):
    message = Message(topic)
    message.set_keys(f"k{number}")
    message.set_tags(("even", "odd")[number % 2])
    message.set_property("own", "value")
    message.set_body(f"cpp {number}")
    status.append(int(send(message).status))
    if during and number == 0:
        consumer.start()
    if during and number in (0, count // 2):
        wait(number + 1)
    if number == count // 2:
        print("half", flush=True)  # the test may kill the master now
producer.shutdown()
if not during:
    consumer.start()
wait(count)
consumer.shutdown()
print(json.dumps({"status": status, "received": received, "rich": rich}), flush=True)
