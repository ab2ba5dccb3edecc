"""A producer of any version: `python client.py ADDRESSES NAME`, ended by a line on stdin.

It runs with the modules of that version on its path. It prints a line of JSON for each message that
was acknowledged, [body, queue, queue offset], and one, [body], for each whose outcome is unknown.
"""

import json
import select
import sys

from hastore import Producer
from hastore.errors import DurabilityError, NotStoredError, OutcomeUnknown


def main() -> None:
    addresses, name = sys.argv[1].split(","), sys.argv[2]
    number = 0
    with Producer(addresses, delivery_timeout_s=60.0) as producer:
        while not select.select([sys.stdin], [], [], 0.02)[0]:
            body = f"{name}-{number:08d}"
            number += 1
            try:
                result = producer.send_sync("T", body.encode(), key=str(number % 7))
                line = [body, result.queue_id, result.queue_offset]
            except (OutcomeUnknown, DurabilityError):
                line = [body]
            except NotStoredError:
                continue
            print(json.dumps(line), flush=True)


main()
