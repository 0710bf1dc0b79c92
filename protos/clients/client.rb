# Generate from Ruby without generated code: the description of the messages comes from a file that protoc made
# (--descriptor_set_out --include_imports). Usage: ruby client.rb DESCRIPTORS HOST:PORT TEXT [cancel]
# `cancel` ends the call after its first message. QUIRE_API_KEY is sent as API key, if set.
require "grpc"
require "google/protobuf"
require "google/protobuf/descriptor_pb"

descriptors, address, text, cancel = ARGV
pool = Google::Protobuf::DescriptorPool.generated_pool
set = Google::Protobuf::FileDescriptorSet.decode(File.binread(descriptors))
set.file.each { |file| pool.add_serialized_file(Google::Protobuf::FileDescriptorProto.encode(file)) }
request, response, sampling = %w[
  quire.inference.v1.GenerateRequest quire.inference.v1.GenerateResponse quire.common.v1.SamplingParams
].map { |name| pool.lookup(name).msgclass }

stub = GRPC::ClientStub.new(address, :this_channel_is_insecure)
encode = ->(message) { request.encode(message) }
decode = ->(bytes) { response.decode(bytes) }
message = request.new(text: text, sampling: sampling.new(temperature: 0, max_tokens: 20))
path = "/quire.inference.v1.InferenceService/Generate"
key = ENV["QUIRE_API_KEY"]
metadata = key ? { "authorization" => "Bearer #{key}" } : {}
begin
  call = stub.server_streamer(path, message, encode, decode, deadline: Time.now + 30, metadata: metadata, return_op: true)
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
