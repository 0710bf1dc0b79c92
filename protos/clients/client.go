// Generate from Go. The protos name no Go package, so the command that generates the code does (protos/README.md):
// here it is quirepb/inference and quirepb/common.
//
//	client HOST:PORT TEXT [cancel]
//
// `cancel` ends the call after its first message. QUIRE_API_KEY is sent as API key, if set.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"quirepb/common"
	"quirepb/inference"
)

func generate(address, text string, cancel bool) error {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, end := context.WithTimeout(context.Background(), 30*time.Second)
	defer end()
	if key := os.Getenv("QUIRE_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	temperature, maxTokens := float32(0), uint32(20)
	stream, err := inference.NewInferenceServiceClient(connection).Generate(ctx, &inference.GenerateRequest{
		Prompt:   &inference.GenerateRequest_Text{Text: text},
		Sampling: &common.SamplingParams{Temperature: &temperature, MaxTokens: &maxTokens},
	})
	for err == nil {
		var message *inference.GenerateResponse
		if message, err = stream.Recv(); err == nil {
			fmt.Print(message.Text)
			if cancel {
				end()
			}
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}

func main() {
	err := generate(os.Args[1], os.Args[2], len(os.Args) > 3)
	if err == nil {
		return
	}
	failed := status.Convert(err)
	if failed.Code() == codes.Canceled {
		fmt.Fprintln(os.Stderr, "CANCELLED")
		return
	}
	fmt.Fprintf(os.Stderr, "%v: %s\n", failed.Code(), failed.Message())
	for _, detail := range failed.Details() {
		if retry, found := detail.(*errdetails.RetryInfo); found {
			fmt.Fprintf(os.Stderr, "again in %v\n", retry.RetryDelay.AsDuration())
		}
	}
	os.Exit(1)
}
