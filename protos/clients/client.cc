// Generate from C++, with code that protoc and grpc_cpp_plugin made (protos/README.md).
//
//   client HOST:PORT TEXT [cancel]
//
// `cancel` ends the call after its first message. QUIRE_API_KEY is sent as API key, if set.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>

#include "quire/inference/v1/inference.grpc.pb.h"

using quire::inference::v1::GenerateRequest;
using quire::inference::v1::GenerateResponse;
using quire::inference::v1::InferenceService;

int main(int count, char** arguments) {
  if (count < 3) return 2;
  const bool cancel = count > 3;
  auto channel = grpc::CreateChannel(arguments[1], grpc::InsecureChannelCredentials());
  auto stub = InferenceService::NewStub(channel);

  GenerateRequest request;
  request.set_text(arguments[2]);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(20);

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  if (const char* key = std::getenv("QUIRE_API_KEY")) {
    context.AddMetadata("authorization", std::string("Bearer ") + key);
  }
  auto reader = stub->Generate(&context, request);
  GenerateResponse message;
  while (reader->Read(&message)) {
    std::cout << message.text() << std::flush;
    if (cancel) context.TryCancel();
  }
  const grpc::Status status = reader->Finish();
  if (status.error_code() == grpc::StatusCode::CANCELLED) {
    std::cerr << "CANCELLED\n";
    return 0;
  }
  if (!status.ok()) {
    std::cerr << status.error_code() << ": " << status.error_message() << "\n";
    return 1;
  }
  return 0;
}
