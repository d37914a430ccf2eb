"""Whether the server in this container is ready, as an exit code."""

import os
import ssl
import sys
import urllib.request

secure = bool(os.environ.get("MLXCEL_SSL_CERT_FILE"))
url = f"{'https' if secure else 'http'}://127.0.0.1:{os.environ.get('MLXCEL_PORT') or 8080}/health/ready"
context = ssl._create_unverified_context() if secure else None
try:
    urllib.request.urlopen(url, timeout=4, context=context).close()
except OSError as error:
    sys.exit(f"{url}: {error}")
