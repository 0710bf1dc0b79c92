// Generate from Java, with the messages that protoc made (--java_out) and no plugin (protos/README.md).
//
//   java Client HOST:PORT TEXT [cancel]
//
// `cancel` ends the call after its first message. QUIRE_API_KEY is sent as API key, if set.
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
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import java.util.Iterator;
import java.util.concurrent.TimeUnit;
import quire.common.v1.Sampling.SamplingParams;
import quire.inference.v1.Inference.GenerateRequest;
import quire.inference.v1.Inference.GenerateResponse;

public class Client {
  static final MethodDescriptor<GenerateRequest, GenerateResponse> GENERATE =
      MethodDescriptor.<GenerateRequest, GenerateResponse>newBuilder()
          .setType(MethodDescriptor.MethodType.SERVER_STREAMING)
          .setFullMethodName("quire.inference.v1.InferenceService/Generate")
          .setRequestMarshaller(ProtoUtils.marshaller(GenerateRequest.getDefaultInstance()))
          .setResponseMarshaller(ProtoUtils.marshaller(GenerateResponse.getDefaultInstance()))
          .build();

  static Channel withKey(Channel channel, String key) {
    if (key == null) return channel;
    Metadata metadata = new Metadata();
    metadata.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + key);
    return ClientInterceptors.intercept(channel, MetadataUtils.newAttachHeadersInterceptor(metadata));
  }

  /** Inside of `call`; ends it after the first message if that is wanted. */
  static void generate(Channel channel, String text, Context.CancellableContext call, boolean cancel) {
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setText(text)
            .setSampling(SamplingParams.newBuilder().setTemperature(0).setMaxTokens(20))
            .build();
    CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(30, TimeUnit.SECONDS);
    Iterator<GenerateResponse> messages =
        ClientCalls.blockingServerStreamingCall(channel, GENERATE, options, request);
    while (messages.hasNext()) {
      System.out.print(messages.next().getText());
      System.out.flush();
      if (cancel) call.cancel(null);
    }
  }

  public static void main(String[] arguments) throws InterruptedException {
    ManagedChannel channel = NettyChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    int status = 0;
    try (Context.CancellableContext call = Context.current().withCancellation()) {
      Channel known = withKey(channel, System.getenv("QUIRE_API_KEY"));
      call.run(() -> generate(known, arguments[1], call, arguments.length > 2));
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
