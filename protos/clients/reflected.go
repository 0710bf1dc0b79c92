// Generate from Go, with the server's own description (protos/README.md).
//
//	reflected VERSION HOST:PORT TEXT [cancel]
//
// VERSION of reflection is v1 or v1alpha; `cancel` ends the call after its first message. QUIRE_API_KEY is sent
// as API key, if set.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1alpha" // the messages of v1 are the same
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
)

// The files that a server has sent, each once.
type known struct {
	names map[string]bool
	files descriptorpb.FileDescriptorSet
}

func (known *known) add(encoded []byte) error {
	file := &descriptorpb.FileDescriptorProto{}
	err := proto.Unmarshal(encoded, file)
	if err == nil && !known.names[file.GetName()] {
		known.names[file.GetName()] = true
		known.files.File = append(known.files.File, file)
	}
	return err
}

// learn asks for the files of every listed service, with all of their imports.
func learn(ctx context.Context, connection *grpc.ClientConn, version string) (*protoregistry.Files, error) {
	ctx, end := context.WithTimeout(ctx, 10*time.Second)
	defer end()
	both := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	path := "/grpc.reflection." + version + ".ServerReflection/ServerReflectionInfo"
	stream, err := connection.NewStream(ctx, both, path)
	if err != nil {
		return nil, err
	}
	// An error of sending is ignored here: receiving the answer returns its cause.
	stream.SendMsg(&reflection.ServerReflectionRequest{
		MessageRequest: &reflection.ServerReflectionRequest_ListServices{ListServices: "*"},
	})
	found := known{names: map[string]bool{}}
	for {
		answer := &reflection.ServerReflectionResponse{}
		if err = stream.RecvMsg(answer); err == io.EOF {
			return protodesc.NewFiles(&found.files)
		} else if err != nil {
			return nil, err
		}
		if failed := answer.GetErrorResponse(); failed != nil {
			return nil, status.Error(codes.Code(failed.ErrorCode), failed.ErrorMessage)
		}
		if services := answer.GetListServicesResponse(); services != nil {
			for _, service := range services.Service {
				symbol := &reflection.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: service.Name}
				stream.SendMsg(&reflection.ServerReflectionRequest{MessageRequest: symbol})
			}
			stream.CloseSend()
		}
		for _, encoded := range answer.GetFileDescriptorResponse().GetFileDescriptorProto() {
			if err = found.add(encoded); err != nil {
				return nil, err
			}
		}
	}
}

func requestOf(method protoreflect.MethodDescriptor, text string) (*dynamicpb.Message, error) {
	asked, err := json.Marshal(map[string]any{
		"text":     text,
		"sampling": map[string]any{"temperature": 0, "max_tokens": 20},
	})
	if err != nil {
		return nil, err
	}
	request := dynamicpb.NewMessage(method.Input())
	return request, protojson.Unmarshal(asked, request)
}

func generate(
	ctx context.Context, connection *grpc.ClientConn, method protoreflect.MethodDescriptor, text string, cancel bool,
) error {
	ctx, end := context.WithTimeout(ctx, 30*time.Second)
	defer end()
	request, err := requestOf(method, text)
	if err != nil {
		return err
	}
	path := fmt.Sprintf("/%s/%s", method.Parent().FullName(), method.Name())
	stream, err := connection.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, path)
	if err != nil {
		return err
	}
	stream.SendMsg(request)
	stream.CloseSend()
	for {
		message := dynamicpb.NewMessage(method.Output())
		if err = stream.RecvMsg(message); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		fmt.Print(message.Get(method.Output().Fields().ByName("text")).String())
		if cancel {
			end()
		}
	}
}

func run(version, address, text string, cancel bool) error {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx := context.Background()
	if key := os.Getenv("QUIRE_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	files, err := learn(ctx, connection, version)
	if err != nil {
		return err
	}
	name := protoreflect.FullName("quire.inference.v1.InferenceService.Generate")
	found, err := files.FindDescriptorByName(name)
	if err != nil {
		return status.Errorf(codes.NotFound, "no %s there", name)
	}
	return generate(ctx, connection, found.(protoreflect.MethodDescriptor), text, cancel)
}

func main() {
	err := run(os.Args[1], os.Args[2], os.Args[3], len(os.Args) > 4)
	if err == nil {
		return
	}
	failed := status.Convert(err)
	if failed.Code() == codes.Canceled {
		fmt.Fprintln(os.Stderr, "CANCELLED")
		return
	}
	fmt.Fprintf(os.Stderr, "%v: %s\n", failed.Code(), failed.Message())
	os.Exit(1)
}
