# Generate from Ruby, with the server's own description. Usage: ruby reflected.rb VERSION HOST:PORT TEXT [cancel]
# VERSION of reflection is v1 or v1alpha; `cancel` ends the call after its first message. QUIRE_API_KEY is sent
# as API key, if set.
require "grpc"
require "google/protobuf"
require "google/protobuf/descriptor_pb"

include Google::Protobuf

VERSION, address, text, cancel = ARGV
STUB = GRPC::ClientStub.new(address, :this_channel_is_insecure)
METADATA = ENV.key?("QUIRE_API_KEY") ? { "authorization" => "Bearer #{ENV["QUIRE_API_KEY"]}" } : {}
POOL = DescriptorPool.new # for as long as there are messages of its classes

# The required part of grpc/reflection/v1/reflection.proto. That of v1alpha has the same messages.
REFLECTION = {
  "Question" => { file_containing_symbol: [4, :TYPE_STRING], list_services: [7, :TYPE_STRING] },
  "Answer" => { files: [4, "Files"], services: [6, "Services"], error: [7, "Error"] },
  "Files" => { file: [1, :TYPE_BYTES, :LABEL_REPEATED] },
  "Services" => { service: [1, "Service", :LABEL_REPEATED] },
  "Service" => { name: [1, :TYPE_STRING] },
  "Error" => { code: [1, :TYPE_INT32], message: [2, :TYPE_STRING] }
}

def field(name, number, type, label = :LABEL_OPTIONAL)
  of = type.is_a?(String) ? { type: :TYPE_MESSAGE, type_name: ".reflection.#{type}" } : { type: type }
  FieldDescriptorProto.new(name: name.to_s, number: number, label: label, **of)
end

def message_class(name)
  described = POOL.lookup(name) or abort "no #{name} there"
  described.msgclass
end

# google-protobuf 3.21 crashes on reading a part of a message whose class has not been requested.
def ask_for_classes(messages, scope)
  messages.each do |message|
    name = "#{scope}.#{message.name}"
    message_class(name)
    ask_for_classes(message.nested_type, name)
  end
end

def add(file)
  POOL.add_serialized_file(FileDescriptorProto.encode(file))
  ask_for_classes(file.message_type, file.package)
end

messages = REFLECTION.map do |message, fields|
  DescriptorProto.new(name: message, field: fields.map { |name, options| field(name, *options) })
end
add(FileDescriptorProto.new(name: "reflection", package: "reflection", syntax: "proto3", message_type: messages))

# The answers to questions of one kind, asked on one stream.
def ask(kind, subjects)
  questions = subjects.map { |subject| message_class("reflection.Question").new(kind => subject) }
  decode = message_class("reflection.Answer").method(:decode)
  path = "/grpc.reflection.#{VERSION}.ServerReflection/ServerReflectionInfo"
  options = { deadline: Time.now + 10, metadata: METADATA }
  STUB.bidi_streamer(path, questions, ->(question) { question.to_proto }, decode, **options).map do |answer|
    raise GRPC::BadStatus.new(answer.error.code, answer.error.message) if answer.error
    answer
  end
end

# Adds the file of that name, what it imports first.
def add_with_imports(name, files)
  file = files.delete(name) or return
  file.dependency.each { |import| add_with_imports(import, files) }
  add(file)
end

# Adds the files of every listed service.
def learn
  services = ask(:list_services, ["*"]).first.services.service.map(&:name)
  encoded = ask(:file_containing_symbol, services).flat_map { |answer| answer.files.file.to_a }
  files = encoded.map { |bytes| FileDescriptorProto.decode(bytes) }.to_h { |file| [file.name, file] }
  files.keys.each { |name| add_with_imports(name, files) }
end

begin
  learn
  request, response, sampling = %w[
    quire.inference.v1.GenerateRequest quire.inference.v1.GenerateResponse quire.common.v1.SamplingParams
  ].map { |name| message_class(name) }
  message = request.new(text: text, sampling: sampling.new(temperature: 0, max_tokens: 20))
  path = "/quire.inference.v1.InferenceService/Generate"
  options = { deadline: Time.now + 30, metadata: METADATA, return_op: true }
  call = STUB.server_streamer(path, message, request.method(:encode), response.method(:decode), **options)
  call.execute.each do |part|
    print part.text
    call.cancel if cancel
  end
rescue GRPC::Cancelled
  warn "CANCELLED"
rescue GRPC::BadStatus => e
  warn "#{e.code}: #{e.details}"
  exit 1
end
