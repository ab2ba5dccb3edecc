"""A script for spark-submit that leaves everything to its configuration: no registration."""

import sys

from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
for where, value in (("path", sys.argv[1]), ("hastore.bootstrap.servers", sys.argv[2])):
    topic = "t" if where == "path" else "copy"
    frame = spark.read.format("hastore").option("subscribe", topic).option(where, value).load()
    print(where, frame.count())
tasks = spark.sparkContext.parallelize(range(8), 8)
print("from", *sorted(set(tasks.map(lambda _: __import__("hastore").__file__).collect())))
spark.stop()
