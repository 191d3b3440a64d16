;;; akunu.el --- Inline completion from a local model  -*- lexical-binding: t; -*-

;;; Commentary:
;; Emacs with lsp-mode 10 or later: inline completion over LSP, in addition to other servers.

;;; Code:

(require 'lsp-mode)
(require 'lsp-inline-completion)

(defgroup akunu nil
  "Completions from a local model."
  :group 'lsp-mode)

(defcustom akunu-command '("akunu" "complete")
  "The completion program and its arguments."
  :type '(repeat string))

(lsp-register-client
 (make-lsp-client
  :server-id 'akunu
  :new-connection (lsp-stdio-connection (lambda () (append akunu-command '("--lsp"))))
  :activation-fn (lambda (_file _mode) t) ; any file
  :add-on? t
  :multi-root t
  :priority -1))

(setq lsp-inline-completion-enable t
      lsp-inline-completion-idle-delay 0.2)

(dolist (key '("TAB" "<tab>"))
  (define-key lsp-inline-completion-active-map (kbd key) #'lsp-inline-completion-accept))

(provide 'akunu)
;;; akunu.el ends here
