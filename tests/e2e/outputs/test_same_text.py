"""Every API returns the same greedy text."""

from __future__ import annotations

import grpc
import openai
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from quire import LLM, SamplingParams
from quire.client import Client
from quire.cluster import Cluster

QUESTION = "What is 23 + 45?"
GREEDY = SamplingParams(temperature=0, max_tokens=32)


def through_reflection(address: str) -> str:
    """A client that knows only the address and the names."""
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        request_type, response_type = (
            GetMessageClass(pool.FindMessageTypeByName(f"quire.inference.v1.Chat{kind}"))
            for kind in ("Request", "Response")
        )
        chat = channel.unary_stream(
            "/quire.inference.v1.InferenceService/Chat", request_type.SerializeToString, response_type.FromString
        )
        request = request_type(
            messages=[{"role": "user", "content": QUESTION}], sampling={"temperature": 0, "max_tokens": 32}
        )
        return "".join(message.content for message in chat(request))


def through_openai(address: str, stream: bool) -> str:
    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none")
    with client:
        arguments = {
            "model": client.models.list().data[0].id,
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": 32,
        }
        if not stream:
            return client.chat.completions.create(**arguments).choices[0].message.content or ""
        chunks = client.chat.completions.create(**arguments, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_every_way_to_ask_gives_the_right_answer(cluster: Cluster, client: Client) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    with LLM(address=cluster.grpc_address) as llm:
        answers = {
            "reflection": through_reflection(cluster.grpc_address),
            "openai": through_openai(cluster.http_address, stream=False),
            "openai stream": through_openai(cluster.http_address, stream=True),
            "client": client.chat(messages, GREEDY)[0].text,
            "client stream": "".join(delta.text for delta in client.stream_chat(messages, GREEDY)),
            "LLM": llm.chat(messages, GREEDY)[0].text,
        }
    assert set(answers.values()) == {"68"}, answers
