// Generate from Java, with the server's own description (protos/README.md).
//
//   java Reflected VERSION HOST:PORT TEXT [cancel]
//
// VERSION of reflection is v1 or v1alpha; `cancel` ends the call after its first message. QUIRE_API_KEY is sent
// as API key, if set.
import com.google.protobuf.ByteString;
import com.google.protobuf.DescriptorProtos.FileDescriptorProto;
import com.google.protobuf.Descriptors;
import com.google.protobuf.Descriptors.FileDescriptor;
import com.google.protobuf.DynamicMessage;
import com.google.protobuf.TextFormat;
import com.google.protobuf.UnknownFieldSet;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientInterceptors;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.protobuf.ProtoUtils;
import io.grpc.protobuf.lite.ProtoLiteUtils;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

public class Reflected {
  // Fields of grpc/reflection/v1/reflection.proto, of which Debian has no code. Those of v1alpha are the same.
  static final int FILE_CONTAINING_SYMBOL = 4, LIST_SERVICES = 7; // of a question
  static final int FILES = 4, SERVICES = 6, ERROR = 7; // of an answer
  static final int FILE = 1, SERVICE = 1, NAME = 1, ERROR_MESSAGE = 2;

  final Channel channel;
  final MethodDescriptor<UnknownFieldSet, UnknownFieldSet> reflection;
  final Map<String, FileDescriptorProto> described = new HashMap<>();
  final Map<String, FileDescriptor> files = new HashMap<>();

  Reflected(Channel channel, String version) {
    this.channel = channel;
    reflection =
        MethodDescriptor.<UnknownFieldSet, UnknownFieldSet>newBuilder()
            .setType(MethodDescriptor.MethodType.BIDI_STREAMING)
            .setFullMethodName("grpc.reflection." + version + ".ServerReflection/ServerReflectionInfo")
            .setRequestMarshaller(ProtoLiteUtils.marshaller(UnknownFieldSet.getDefaultInstance()))
            .setResponseMarshaller(ProtoLiteUtils.marshaller(UnknownFieldSet.getDefaultInstance()))
            .build();
  }

  /** A question of its own call. */
  UnknownFieldSet ask(int kind, ByteString subject) throws Exception {
    UnknownFieldSet.Field field = UnknownFieldSet.Field.newBuilder().addLengthDelimited(subject).build();
    UnknownFieldSet question = UnknownFieldSet.newBuilder().addField(kind, field).build();
    CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(10, TimeUnit.SECONDS);
    UnknownFieldSet answer = ClientCalls.blockingServerStreamingCall(channel, reflection, options, question).next();
    for (UnknownFieldSet error : messages(answer, ERROR)) {
      String message = parts(error, ERROR_MESSAGE).get(0).toStringUtf8();
      throw Status.UNKNOWN.withDescription(message).asRuntimeException();
    }
    return answer;
  }

  static List<ByteString> parts(UnknownFieldSet message, int field) {
    return message.getField(field).getLengthDelimitedList();
  }

  static List<UnknownFieldSet> messages(UnknownFieldSet message, int field) throws Exception {
    List<UnknownFieldSet> messages = new ArrayList<>();
    for (ByteString part : parts(message, field)) messages.add(UnknownFieldSet.parseFrom(part));
    return messages;
  }

  /** The files of every listed service, with all of their imports. */
  void learn() throws Exception {
    for (UnknownFieldSet services : messages(ask(LIST_SERVICES, ByteString.copyFromUtf8("*")), SERVICES)) {
      for (UnknownFieldSet service : messages(services, SERVICE)) {
        UnknownFieldSet answer = ask(FILE_CONTAINING_SYMBOL, parts(service, NAME).get(0));
        for (UnknownFieldSet part : messages(answer, FILES)) {
          for (ByteString bytes : parts(part, FILE)) {
            FileDescriptorProto file = FileDescriptorProto.parseFrom(bytes);
            described.put(file.getName(), file);
          }
        }
      }
    }
    for (String name : described.keySet()) build(name);
  }

  FileDescriptor build(String name) throws Descriptors.DescriptorValidationException {
    if (!files.containsKey(name)) {
      FileDescriptorProto file = described.get(name);
      FileDescriptor[] imports = new FileDescriptor[file.getDependencyCount()];
      for (int i = 0; i < imports.length; i++) imports[i] = build(file.getDependency(i));
      files.put(name, FileDescriptor.buildFrom(file, imports));
    }
    return files.get(name);
  }

  Descriptors.MethodDescriptor find(String packageName, String service, String method) {
    for (FileDescriptor file : files.values()) {
      boolean isThere = file.getPackage().equals(packageName) && file.findServiceByName(service) != null;
      if (isThere) return file.findServiceByName(service).findMethodByName(method);
    }
    throw Status.NOT_FOUND.withDescription("no " + packageName + "." + service + " there").asRuntimeException();
  }

  /** Inside of `call`; ends it after the first message if that is wanted. */
  void generate(String text, Context.CancellableContext call, boolean cancel) throws Exception {
    learn();
    Descriptors.MethodDescriptor found = find("quire.inference.v1", "InferenceService", "Generate");
    MethodDescriptor<DynamicMessage, DynamicMessage> method =
        MethodDescriptor.<DynamicMessage, DynamicMessage>newBuilder()
            .setType(MethodDescriptor.MethodType.SERVER_STREAMING)
            .setFullMethodName(found.getService().getFullName() + "/" + found.getName())
            .setRequestMarshaller(ProtoUtils.marshaller(DynamicMessage.getDefaultInstance(found.getInputType())))
            .setResponseMarshaller(ProtoUtils.marshaller(DynamicMessage.getDefaultInstance(found.getOutputType())))
            .build();
    DynamicMessage.Builder request = DynamicMessage.newBuilder(found.getInputType());
    TextFormat.merge("sampling { temperature: 0 max_tokens: 20 }", request);
    request.setField(found.getInputType().findFieldByName("text"), text);
    CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(30, TimeUnit.SECONDS);
    Iterator<DynamicMessage> messages =
        ClientCalls.blockingServerStreamingCall(channel, method, options, request.build());
    while (messages.hasNext()) {
      System.out.print(messages.next().getField(found.getOutputType().findFieldByName("text")));
      System.out.flush();
      if (cancel) call.cancel(null);
    }
  }

  static Channel withKey(Channel channel, String key) {
    if (key == null) return channel;
    Metadata metadata = new Metadata();
    metadata.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + key);
    return ClientInterceptors.intercept(channel, MetadataUtils.newAttachHeadersInterceptor(metadata));
  }

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel = NettyChannelBuilder.forTarget(arguments[1]).usePlaintext().build();
    int status = 0;
    try (Context.CancellableContext call = Context.current().withCancellation()) {
      Reflected reflected = new Reflected(withKey(channel, System.getenv("QUIRE_API_KEY")), arguments[0]);
      call.call(
          () -> {
            reflected.generate(arguments[2], call, arguments.length > 3);
            return null;
          });
    } catch (StatusRuntimeException error) {
      boolean cancelled = error.getStatus().getCode() == Status.Code.CANCELLED;
      String code = error.getStatus().getCode().name();
      System.err.println(cancelled ? code : code + ": " + error.getStatus().getDescription());
      status = cancelled ? 0 : 1;
    }
    channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    System.exit(status);
  }
}
