"""Bodies that RocketMQ's clients and hastore's compress are read by the others, as they were."""

import asyncio
import hashlib
import random

import pytest

import hastore.aio
from hastore import Consumer, Producer
from hastore.record.compression import ALGORITHMS
from tests.interop.rocketmq_clients import HastoreSite

pytestmark = [pytest.mark.full, pytest.mark.slow("it starts two JVMs with RocketMQ's clients")]
VERSIONS = ("5.3.3", "4.9.8")
SHOWN_BYTES = 400  # Java tells of a longer body its SHA-1


def shown(body):
    return hashlib.sha1(body).hexdigest() if len(body) > SHOWN_BYTES else body.decode()


@pytest.fixture
def site(make_group):
    group = make_group(2, store={"commitlog_file_size": "16MiB"}).start()
    site = HastoreSite(group, "classic")
    site.writable()
    return site


@pytest.fixture
def jvms(make_jvm):
    return {version: make_jvm(f"clients-{version[0]}", version) for version in VERSIONS}


def read(site, topic, count):
    """Return all messages of a topic, as hastore's Consumer reads them."""
    found = []
    with Consumer(topic, site.group.bootstrap) as consumer:
        while len(found) < count:
            found += consumer.poll(timeout_s=30)
    return found


def texts(chance, count):
    """Return bodies of letters: empty ones, short ones, and many blocks of LZ4 long ones."""
    sizes = [0, 1, 4_095, 4_096, 300_000, *(int(10 ** chance.uniform(3, 5)) for _ in range(count))]
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(3, 9))) for _ in range(200)]
    return [" ".join(chance.choices(words, k=size // 4 + 1))[:size].encode() for size in sizes]


def test_java_reads_what_hastore_compresses(site, jvms):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    bodies = texts(random.Random(seed), 20)
    for algorithm in ALGORITHMS:

        async def send(topic, algorithm=algorithm):
            async with hastore.aio.Producer(site.group.bootstrap, compression=algorithm) as one:
                for body in bodies:
                    await one.send(topic, body)

        with Producer(site.group.bootstrap, compression=algorithm) as producer:
            for body in bodies:
                producer.send_sync(f"from-{algorithm}", body, tags="a")
            producer.send_sync(f"late-{algorithm}", bodies[4], delay_level=1)
        asyncio.run(send(f"aio-{algorithm}"))
        [late] = read(site, f"late-{algorithm}", 1)
        assert (late.body, late.compression) == (bodies[4], algorithm), "it was delivered"
        for version, jvm in jvms.items():
            puller = jvm.puller(site, f"readers-{version[0]}-{algorithm}")
            for kind, sent in (("from", bodies), ("aio", bodies), ("late", [bodies[4]])):
                found = jvm.all_of(puller, f"{kind}-{algorithm}")
                assert sorted(one.get("body", "") for one in found) == sorted(map(shown, sent)), (
                    version,
                    algorithm,
                )
        packed = [one for one in read(site, f"from-{algorithm}", len(bodies)) if one.compression]
        assert len(packed) == sum(len(body) >= 4_096 for body in bodies)


def test_hastore_and_the_other_java_read_what_java_compresses(site, jvms):
    for version, jvm in jvms.items():
        for algorithm in ALGORITHMS:
            topic = f"java-{version[0]}-{algorithm}"
            jvm.call("property", name="rocketmq.message.compressType", value=algorithm.upper())
            producer = jvm.producer(site)
            sizes = [1, 100, 409, 410, 5_000, 100_000]
            messages = [{"topic": topic, "body": "compresses", "repeat": size} for size in sizes]
            for message in messages:
                jvm.send(producer, [message])
            jvm.send(producer, messages[:5], "batch")
            jvm.call("producer.stop", name=producer)
            bodies = [b"compresses" * size for size in sizes]
            found = read(site, topic, len(sizes) + 5)
            kinds = sorted((len(one.body), one.compression or "") for one in found)
            assert kinds == sorted(
                [(len(body), algorithm if len(body) >= 4_096 else "") for body in bodies]
                + [(len(body), "") for body in bodies[:5]]  # no batch is compressed
            )
            expected = sorted(map(shown, bodies + bodies[:5]))
            assert sorted(shown(one.body) for one in found) == expected
            for reader, other in jvms.items():
                puller = other.puller(site, f"{topic}-{reader[0]}")
                told = sorted(one["body"] for one in other.all_of(puller, topic))
                assert told == expected, (version, algorithm, reader)
