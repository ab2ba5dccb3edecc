"""A real server of S3's protocol, moto's, in a thread of the tests, and what lies there."""

import contextlib
import logging
import os
import uuid

import pyarrow.fs as pafs
import pytest
from moto.server import ThreadedMotoServer


@contextlib.contextmanager
def s3_server():
    """Run a server on a free port; yield the variables that lead AWS' tools there, and set them."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            yield variables
    finally:
        server.stop()


def client():
    """Return pyarrow's file system of the server, with the right to make buckets."""
    return pafs.S3FileSystem(
        endpoint_override=os.environ["AWS_ENDPOINT_URL"],
        region="us-east-1",
        allow_bucket_creation=True,
    )


def new_target(fs):
    """Make a bucket; return the URL of a folder in it."""
    bucket = f"bucket-{uuid.uuid4().hex}"
    fs.create_dir(bucket)
    return f"s3://{bucket}/lake/flights"
