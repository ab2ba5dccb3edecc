"""SQL filters give what RocketMQ's own parser gives, for random expressions and records."""

import random
import re

from hastore.record.sql_filter import SqlError, compile_sql
from tests.record.sql_expressions import Expressions
from tests.record.test_sql_filter import CASES, RECORDS, REFUSED

EXPRESSIONS, EACH = 6000, 40


def results(text, records):
    try:
        found = compile_sql(text)
    except SqlError as failure:
        return None, str(failure)
    return [found.matches(record) for record in records], ""


def test_random_filters_match_the_same_records_as_in_rocketmq(make_peer):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    made = Expressions(random.Random(seed))
    texts = sorted({made.text() for _ in range(EXPRESSIONS)})
    records = [made.record() for _ in range(EACH)]
    peer = make_peer()
    expected = peer.call("filter.matches", expressions=texts, records=records)
    cases = [*CASES, *(text for text, why in REFUSED.items() if "unexpected" not in why)]
    listed = peer.call("filter.matches", expressions=cases, records=list(RECORDS))
    assert listed == [results(text, RECORDS)[0] for text in cases]
    others = []
    for text, wanted in zip(texts, expected, strict=True):
        found, refusal = results(text, records)
        # RocketMQ ignores what follows a complete expression.
        place = re.search(r"unexpected .* at character (\d+)", refusal, re.S)
        if wanted is not None and place is not None:
            found, refusal = results(text[: int(place[1]) - 1], records)
        if found != wanted:
            others.append((text, refusal, wanted))
    assert not others, (len(others), others[:10])
    assert sum(one is not None for one in expected) > len(texts) / 4
