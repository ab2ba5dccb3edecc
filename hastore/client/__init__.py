"""Clients of a group of nodes: Producer, Consumer, Admin."""

from hastore.client.consumer.admin import Admin
from hastore.client.consumer.consumer import Consumer
from hastore.client.consumer.shared_consumer import SharedConsumer
from hastore.client.consumer.subscription import RebalanceListener, TopicQueue
from hastore.client.messages import (
    GroupMember,
    GroupMembers,
    Message,
    NodeInfo,
    Position,
    SendResult,
    SilentNode,
    Status,
)
from hastore.client.producer.producer import OutgoingMessage, Producer
from hastore.client.producer.transactions import Decision
from hastore.client.security import Security

__all__ = [
    "Admin",
    "Consumer",
    "Decision",
    "GroupMember",
    "GroupMembers",
    "Message",
    "NodeInfo",
    "OutgoingMessage",
    "Position",
    "Producer",
    "RebalanceListener",
    "Security",
    "SendResult",
    "SharedConsumer",
    "SilentNode",
    "Status",
    "TopicQueue",
]
