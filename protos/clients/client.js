// Generate from Node, without generated code: `npm install @grpc/grpc-js @grpc/proto-loader`, then
// node client.js PROTOS HOST:PORT TEXT [cancel]
// PROTOS is the folder with these files' protos; `cancel` ends the call after its first message. QUIRE_API_KEY is sent
// as API key, if set.
"use strict";

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [protos, address, text, cancel] = process.argv.slice(2);
const options = { includeDirs: [protos], keepCase: true, defaults: true };
const described = loader.loadSync("quire/inference/v1/inference.proto", options);
const { InferenceService } = grpc.loadPackageDefinition(described).quire.inference.v1;

const metadata = new grpc.Metadata();
if (process.env.QUIRE_API_KEY) metadata.set("authorization", `Bearer ${process.env.QUIRE_API_KEY}`);

const client = new InferenceService(address, grpc.credentials.createInsecure());
const request = { text, sampling: { temperature: 0, max_tokens: 20 } };
const call = client.generate(request, metadata, { deadline: Date.now() + 30_000 });
call.on("data", (message) => {
  process.stdout.write(message.text);
  if (cancel) call.cancel();
});
call.on("error", (error) => {
  const code = grpc.status[error.code];
  console.error(code === "CANCELLED" ? code : `${code}: ${error.details}`);
  process.exitCode = code === "CANCELLED" ? 0 : 1;
});
call.on("close", () => client.close());
