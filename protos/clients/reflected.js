// Generate from Node, with the server's own description: `npm install @grpc/grpc-js @grpc/proto-loader protobufjs`,
// then node reflected.js VERSION HOST:PORT TEXT [cancel]
// VERSION of reflection is v1 or v1alpha; `cancel` ends the call after its first message. QUIRE_API_KEY is sent
// as API key, if set.
"use strict";

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");
const { FileDescriptorProto } = require("protobufjs/ext/descriptor");

const [version, address, text, cancel] = process.argv.slice(2);
const credentials = grpc.credentials.createInsecure();
const metadata = new grpc.Metadata();
if (process.env.QUIRE_API_KEY) metadata.set("authorization", `Bearer ${process.env.QUIRE_API_KEY}`);

// The required part of grpc/reflection/v1/reflection.proto. That of v1alpha has the same messages.
const REFLECTION = `
  syntax = "proto3";
  package grpc.reflection.${version};
  service ServerReflection {
    rpc ServerReflectionInfo(stream ServerReflectionRequest) returns (stream ServerReflectionResponse);
  }
  message ServerReflectionRequest {
    oneof message_request { string file_containing_symbol = 4; string list_services = 7; }
  }
  message ServerReflectionResponse {
    FileDescriptorResponse file_descriptor_response = 4;
    ListServiceResponse list_services_response = 6;
    ErrorResponse error_response = 7;
  }
  message FileDescriptorResponse { repeated bytes file_descriptor_proto = 1; }
  message ListServiceResponse { repeated ServiceResponse service = 1; }
  message ServiceResponse { string name = 1; }
  message ErrorResponse { int32 error_code = 1; string error_message = 2; }`;

function failed(code, details) {
  return Object.assign(new Error(), { code, details });
}

// The files of every listed service, with all of their imports.
async function describedFiles() {
  const { root } = protobuf.parse(REFLECTION, { keepCase: true });
  const { ServerReflection } = grpc.loadPackageDefinition(loader.fromJSON(root.toJSON())).grpc.reflection[version];
  const client = new ServerReflection(address, credentials);
  const call = client.serverReflectionInfo(metadata, { deadline: Date.now() + 10_000 });
  call.on("close", () => client.close());
  const files = new Map();
  call.write({ list_services: "*" });
  for await (const answer of call) {
    const error = answer.error_response;
    if (error) {
      call.cancel();
      throw failed(error.error_code, error.error_message);
    }
    if (answer.list_services_response) {
      for (const { name } of answer.list_services_response.service) call.write({ file_containing_symbol: name });
      call.end();
    }
    for (const bytes of answer.file_descriptor_response?.file_descriptor_proto ?? []) {
      const file = FileDescriptorProto.decode(bytes);
      files.set(file.name, file);
    }
  }
  return [...files.values()];
}

async function generate() {
  const file = await describedFiles();
  const described = loader.loadFileDescriptorSetFromObject({ file }, { keepCase: true, defaults: true });
  const { InferenceService } = grpc.loadPackageDefinition(described).quire?.inference.v1 ?? {};
  if (!InferenceService) throw failed(grpc.status.NOT_FOUND, "no quire.inference.v1.InferenceService there");
  const client = new InferenceService(address, credentials);
  const request = { text, sampling: { temperature: 0, max_tokens: 20 } };
  const call = client.generate(request, metadata, { deadline: Date.now() + 30_000 });
  call.on("close", () => client.close());
  for await (const message of call) {
    process.stdout.write(message.text);
    if (cancel) call.cancel();
  }
}

generate().catch((error) => {
  const code = grpc.status[error.code];
  if (!code) throw error;
  console.error(code === "CANCELLED" ? code : `${code}: ${error.details}`);
  process.exitCode = code === "CANCELLED" ? 0 : 1;
});
