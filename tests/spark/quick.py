"""Settings of the JVMs that the tests start for Spark.

They run for seconds: the second compiler of the JVM would cost more than it saves.
"""

QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
QUICK = {"spark.driver.extraJavaOptions": QUICK_JVM, "spark.sql.shuffle.partitions": "2"}
# The same for commands that take Spark's settings as arguments.
QUICK_OPTIONS = [part for pair in QUICK.items() for part in ("--conf", "=".join(pair))]
