// What browsers' clients do: Connect's own over fetch (both protocols, bytes and JSON) and over Node's HTTP, and grpc-web.
// node clients.cjs DESCRIPTORS URL; prints what came as JSON. The packages are found by NODE_PATH.
"use strict";

const fs = require("node:fs");
const { createClient, ConnectError, Code } = require("@connectrpc/connect");
const web = require("@connectrpc/connect-web");
const node = require("@connectrpc/connect-node");
const { create, createFileRegistry, fromBinary, toBinary } = require("@bufbuild/protobuf");
const { FileDescriptorSetSchema } = require("@bufbuild/protobuf/wkt");

const [descriptors, baseUrl] = process.argv.slice(2);
const registry = createFileRegistry(fromBinary(FileDescriptorSetSchema, fs.readFileSync(descriptors)));
const service = registry.getService("quire.inference.v1.InferenceService");

const transports = {
  "connect bytes": web.createConnectTransport({ baseUrl, useBinaryFormat: true }),
  "connect JSON": web.createConnectTransport({ baseUrl, useBinaryFormat: false }),
  "grpc-web bytes": web.createGrpcWebTransport({ baseUrl, useBinaryFormat: true }),
  "grpc-web JSON": web.createGrpcWebTransport({ baseUrl, useBinaryFormat: false }),
  "connect node": node.createConnectTransport({ baseUrl, httpVersion: "1.1" }),
  "grpc-web node": node.createGrpcWebTransport({ baseUrl, httpVersion: "1.1" }),
};

async function streamed(client) {
  let text = "";
  const request = { prompt: { case: "text", value: "Hm?" }, sampling: { temperature: 0, maxTokens: 50 } };
  for await (const message of client.generate(request, { timeoutMs: 20_000 })) text += message.text;
  return text;
}

async function refused(call) {
  try {
    await call();
    return "answered";
  } catch (error) {
    const known = ConnectError.from(error);
    return [Code[known.code], known.rawMessage, known.details.map((detail) => detail.type)];
  }
}

async function told(client) {
  const models = await client.listModels({});
  const empty = { prompt: { case: "text", value: "" } };
  return {
    models: models.models.map((model) => model.name),
    text: await streamed(client),
    unary: await refused(() => client.getModel({ model: "other" })),
    stream: await refused(async () => {
      for await (const _ of client.generate(empty));
    }),
  };
}

function grpcWeb(format) {
  globalThis.XMLHttpRequest = require("xhr2");
  const { GrpcWebClientBase, MethodDescriptor, MethodType } = require("grpc-web");
  const { input, output } = service.method.generate;
  const method = new MethodDescriptor(
    `/${service.typeName}/Generate`,
    MethodType.SERVER_STREAMING,
    Object,
    Object,
    (message) => toBinary(input, message),
    (bytes) => fromBinary(output, bytes),
  );
  const request = create(input, { prompt: { case: "text", value: "Hm?" }, sampling: { temperature: 0, maxTokens: 50 } });
  return new Promise((resolve, reject) => {
    let text = "";
    const call = new GrpcWebClientBase({ format }).serverStreaming(
      `${baseUrl}/${service.typeName}/Generate`, request, {}, method,
    );
    call.on("data", (message) => (text += message.text));
    call.on("error", reject);
    call.on("end", () => resolve({ text }));
  });
}

async function main() {
  const found = {};
  for (const [name, transport] of Object.entries(transports)) found[name] = await told(createClient(service, transport));
  found["grpc-web package"] = await grpcWeb("text");
  console.log(JSON.stringify(found));
}

main().then(() => process.exit(0));
