// Renders templates with Go's text/template, the language of Helm, and the few functions that the chart uses.
// Standard input: {"values": {...}, "files": {...}, "namespace": "...", "templates": {...}}; output: texts by template.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"text/template"
)

type files map[string]string

func (found files) Get(name string) string { return found[name] }

func toJson(value interface{}) (string, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(value)
	return strings.TrimSuffix(text.String(), "\n"), err
}

func nindent(spaces int, text string) string {
	indent := strings.Repeat(" ", spaces)
	return "\n" + indent + strings.ReplaceAll(text, "\n", "\n"+indent)
}

func sha256sum(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) }

func main() {
	var asked struct {
		Values    map[string]interface{}
		Files     files
		Namespace string
		Templates map[string]string
	}
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		panic(err)
	}
	functions := template.FuncMap{"toJson": toJson, "toYaml": toJson, "nindent": nindent, "sha256sum": sha256sum}
	root := map[string]interface{}{
		"Values": asked.Values, "Files": asked.Files, "Release": map[string]string{"Namespace": asked.Namespace},
	}
	rendered := map[string]string{}
	for name, text := range asked.Templates {
		var out bytes.Buffer
		parsed := template.Must(template.New(name).Funcs(functions).Option("missingkey=error").Parse(text))
		if err := parsed.Execute(&out, root); err != nil {
			panic(err)
		}
		rendered[name] = out.String()
	}
	if err := json.NewEncoder(os.Stdout).Encode(rendered); err != nil {
		panic(err)
	}
}
