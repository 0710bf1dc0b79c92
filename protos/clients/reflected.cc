// Generate from C++, with the server's own description (protos/README.md).
//
//   reflected VERSION HOST:PORT TEXT [cancel]
//
// VERSION of reflection is v1 or v1alpha; `cancel` ends the call after its first message. QUIRE_API_KEY is sent
// as API key, if set.
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/descriptor_database.h>
#include <google/protobuf/dynamic_message.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace protobuf = google::protobuf;

// A call of any method, with messages as bytes. Each of its steps is waited for.
class Call {
 public:
  Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, std::chrono::seconds most) {
    context_.set_deadline(std::chrono::system_clock::now() + most);
    if (const char* key = std::getenv("QUIRE_API_KEY")) {
      context_.AddMetadata("authorization", std::string("Bearer ") + key);
    }
    stream_ = grpc::GenericStub(channel).PrepareCall(&context_, method, &steps_);
    stream_->StartCall(nullptr);
    Step();
  }

  void Send(const std::string& message) {
    const grpc::Slice slice(message);
    stream_->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    Step();
  }

  void SendNoMore() {
    stream_->WritesDone(nullptr);
    Step();
  }

  // False when no more comes: then Finish tells why.
  bool Receive(std::string* message) {
    grpc::ByteBuffer buffer;
    stream_->Read(&buffer, nullptr);
    if (!Step()) return false;
    grpc::Slice slice;
    if (!buffer.DumpToSingleSlice(&slice).ok()) return false;
    message->assign(reinterpret_cast<const char*>(slice.begin()), slice.size());
    return true;
  }

  void Cancel() { context_.TryCancel(); }

  grpc::Status Finish() {
    grpc::Status status;
    stream_->Finish(&status, nullptr);
    Step();
    return status;
  }

 private:
  bool Step() {
    void* tag = nullptr;
    bool is_done = false;
    return steps_.Next(&tag, &is_done) && is_done;
  }

  grpc::CompletionQueue steps_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

// Fields of grpc/reflection/v1/reflection.proto, of which Debian has no code. Those of v1alpha are the same.
enum Question { kFileContainingSymbol = 4, kListServices = 7 };
enum Answer { kFiles = 4, kServices = 6, kError = 7 };
constexpr int kFile = 1, kService = 1, kName = 1, kErrorMessage = 2;

std::string Asking(Question kind, const std::string& subject) {
  protobuf::UnknownFieldSet question;
  question.AddLengthDelimited(kind, subject);
  std::string bytes;
  question.SerializeToString(&bytes);
  return bytes;
}

// What a message has in a field of texts, bytes or messages.
std::vector<std::string> Parts(const std::string& message, int number) {
  protobuf::UnknownFieldSet fields;
  std::vector<std::string> parts;
  if (!fields.ParseFromString(message)) return parts;
  for (int i = 0; i < fields.field_count(); ++i) {
    const protobuf::UnknownField& field = fields.field(i);
    const bool is_part = field.number() == number && field.type() == field.TYPE_LENGTH_DELIMITED;
    if (is_part) parts.push_back(field.length_delimited());
  }
  return parts;
}

// The files of every listed service, with all of their imports.
grpc::Status Learn(const std::shared_ptr<grpc::Channel>& channel, const std::string& version,
                   protobuf::SimpleDescriptorDatabase* files) {
  const std::string method = "/grpc.reflection." + version + ".ServerReflection/ServerReflectionInfo";
  Call call(channel, method, std::chrono::seconds(10));
  std::set<std::string> known;
  std::string answer;
  call.Send(Asking(kListServices, "*"));
  while (call.Receive(&answer)) {
    for (const std::string& error : Parts(answer, kError)) {
      for (const std::string& message : Parts(error, kErrorMessage)) return {grpc::StatusCode::UNKNOWN, message};
    }
    for (const std::string& services : Parts(answer, kServices)) {
      for (const std::string& service : Parts(services, kService)) {
        for (const std::string& name : Parts(service, kName)) call.Send(Asking(kFileContainingSymbol, name));
      }
      call.SendNoMore();
    }
    for (const std::string& described : Parts(answer, kFiles)) {
      for (const std::string& bytes : Parts(described, kFile)) {
        protobuf::FileDescriptorProto file;
        if (file.ParseFromString(bytes) && known.insert(file.name()).second) files->Add(file);
      }
    }
  }
  return call.Finish();
}

grpc::Status Generate(const std::shared_ptr<grpc::Channel>& channel, const protobuf::MethodDescriptor& method,
                      const std::string& text, bool cancel) {
  protobuf::DynamicMessageFactory messages;
  std::unique_ptr<protobuf::Message> request(messages.GetPrototype(method.input_type())->New());
  std::unique_ptr<protobuf::Message> response(messages.GetPrototype(method.output_type())->New());
  protobuf::TextFormat::ParseFromString("sampling { temperature: 0 max_tokens: 20 }", request.get());
  const auto* prompt = method.input_type()->FindFieldByName("text");
  request->GetReflection()->SetString(request.get(), prompt, text);

  Call call(channel, "/" + method.service()->full_name() + "/" + method.name(), std::chrono::seconds(30));
  call.Send(request->SerializeAsString());
  call.SendNoMore();
  const auto* said = method.output_type()->FindFieldByName("text");
  std::string message;
  while (call.Receive(&message) && response->ParseFromString(message)) {
    std::cout << response->GetReflection()->GetString(*response, said) << std::flush;
    if (cancel) call.Cancel();
  }
  return call.Finish();
}

int main(int count, char** arguments) {
  if (count < 4) return 2;
  auto channel = grpc::CreateChannel(arguments[2], grpc::InsecureChannelCredentials());
  protobuf::SimpleDescriptorDatabase files;
  grpc::Status status = Learn(channel, arguments[1], &files);
  if (status.ok()) {
    protobuf::DescriptorPool pool(&files);
    const std::string name = "quire.inference.v1.InferenceService.Generate";
    const auto* method = pool.FindMethodByName(name);
    status = method ? Generate(channel, *method, arguments[3], count > 4)
                    : grpc::Status(grpc::StatusCode::NOT_FOUND, "no " + name + " there");
  }
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
