"""Exit with 0 if the node of this container answers at /healthz, and with 1 if it does not.

HASTORE_HEALTH_URL: another address, such as https://127.0.0.1:10913/healthz with `security.http:
tls`. The certificate is not checked: it is asked whether the node answers, and nothing is told.
"""

import os
import ssl
import sys
import urllib.request

url = os.environ.get("HASTORE_HEALTH_URL", "http://127.0.0.1:10913/healthz")
context = ssl.create_default_context()
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE
opener = urllib.request.build_opener(
    urllib.request.ProxyHandler({}),  # never through a proxy that the environment may name
    urllib.request.HTTPSHandler(context=context),
)
try:
    with opener.open(url, timeout=5.0) as answer:
        answer.read()
except OSError as failure:
    sys.exit(f"{url}: {failure}")
