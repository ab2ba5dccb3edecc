"""A script for spark-submit, whose executors get hastore by --py-files."""

import sys

from pyspark.sql import SparkSession

import hastore.spark

spark = SparkSession.builder.getOrCreate()
hastore.spark.register(spark)  # without it, Spark finds the source on the driver alone
print("path", spark.read.format("hastore").load(sys.argv[1], subscribe="t").count())
tasks = spark.sparkContext.parallelize(range(8), 8)
print("from", *sorted(set(tasks.map(lambda _: __import__("hastore").__file__).collect())))
spark.stop()
